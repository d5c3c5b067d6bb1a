"""Every error fxshard raises on purpose. Each says what was found, where, and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class FxshardError(Exception):
    """Base class of all fxshard errors: ``except fxshard.FxshardError`` catches every one of them."""


class ConfigError(FxshardError):
    """An argument of ``fxshard.compile``, ``shard`` or ``plan`` cannot be used as given."""


class LayoutError(FxshardError):
    """A layout breaks its own rules. This is a bug in the code that built the layout, never in the user's model."""


class CaptureError(FxshardError):
    """``torch.compile`` could not capture the model's forward as fxshard needs it."""


class StateError(FxshardError):
    """The sharded module is not in a state in which this call makes sense."""


class AbsentError(StateError, AttributeError):
    """A property of a sharded model that has no value, or none yet: ``hasattr`` says no, ``getattr`` its default."""


class CheckpointError(FxshardError):
    """A checkpoint is missing, damaged or does not fit the model; on every rank, before anything was changed."""


class PassError(FxshardError):
    """A graph pass was given a graph it cannot work on, or left one that is wrong."""


class PeerError(FxshardError):
    """Another rank failed; this rank stops too instead of waiting for it in a collective."""


class RankDivergenceError(FxshardError):
    """The ranks planned different communication. Raised on every rank before the first collective."""


class BudgetError(ConfigError):
    """No schedule fits the memory budget; ``smallest`` is the least that does, ``seconds`` its simulated step.

    ``with_state``: what would be the least with optimizer state in fewer bits, or on the host, by what to write for it.
    """

    def __init__(self, budget: int, smallest: int, seconds: float, with_state: Mapping[str, int]) -> None:
        others = "".join(f"; with optimizer={choice} {_size(least)} do" for choice, least in with_state.items())
        super().__init__(
            f"memory_budget={_size(budget)} is too small: shards, gradients, optimizer state, the buckets in use and "
            f"activations need at least {_size(smallest)} on each rank, with a simulated step of {seconds * 1e3:.3g} "
            f"ms; raise the budget, shard over more ranks, or make batches or units smaller{others}"
        )
        self.budget = budget
        self.smallest = smallest
        self.seconds = seconds
        self.with_state = dict(with_state)


def _size(size: int) -> str:
    return f"{size} bytes ({size / 2**30:.3f} GiB)"
