"""Looking at a schedule: tables, files, command line."""
