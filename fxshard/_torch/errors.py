"""Every error fxshard raises on purpose. Each says what was found, where, and what to do."""

from __future__ import annotations


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


class CheckpointError(FxshardError):
    """A checkpoint is missing, damaged or does not fit the model; on every rank, before anything was changed."""


class PassError(FxshardError):
    """A graph pass was given a graph it cannot work on, or left one that is wrong."""


class PeerError(FxshardError):
    """Another rank failed; this rank stops too instead of waiting for it in a collective."""


class RankDivergenceError(FxshardError):
    """The ranks planned different communication. Raised on every rank before the first collective."""


class BudgetError(ConfigError):
    """No schedule fits the memory budget; ``smallest`` is the least that does, ``seconds`` its simulated step."""

    def __init__(self, budget: int, smallest: int, seconds: float) -> None:
        super().__init__(
            f"memory_budget={budget} bytes ({budget / 2**30:.3f} GiB) is too small: shards, gradients, optimizer state"
            f", the buckets in use and activations need at least {smallest} bytes ({smallest / 2**30:.3f} GiB) on "
            f"each rank, with a simulated step of {seconds * 1e3:.3g} ms; raise the budget, shard over more ranks, or "
            "make batches or units smaller"
        )
        self.budget = budget
        self.smallest = smallest
        self.seconds = seconds
