"""What everything else stands on: every private torch API, errors, log and progress."""
