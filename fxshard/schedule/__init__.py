"""The schedule as an object: events, record, dependencies, verify, simulate, diff, and how it is drawn."""
