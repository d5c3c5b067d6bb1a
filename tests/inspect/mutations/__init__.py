"""Schedules that break a rule, one family of rules per file: what the verifier must catch."""

from tests.inspect.mutations import collectives, derived, gathers, gradients, memory, offloads, updates
from tests.inspect.mutations.editing import MUTATIONS

__all__ = ["MUTATIONS", "collectives", "derived", "gathers", "gradients", "memory", "offloads", "updates"]
