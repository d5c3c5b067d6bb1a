"""Scheduled graphs, kept beside Inductor's cache for the next start of a program."""
