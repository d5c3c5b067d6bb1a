"""Processes that compile segments beside the one that trains, until its first graphs are compiled."""
