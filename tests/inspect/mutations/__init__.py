"""Schedules that break a rule, one family of rules per file: what the verifier must catch."""
