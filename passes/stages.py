"""What is handed from stage to stage: ``capture → partition → schedule → lower → bind``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import fx

from fxshard.passes.fold_layers import Folded, kept_of
from fxshard.planner.memory import MemoryPlan
from fxshard.schedule.events import Phase
from fxshard.schedule.offloads import Recomputed
from fxshard.schedule.params import ParamRef
from fxshard.schedule.schedule import Schedule


@dataclass(frozen=True)
class Captured:
    """A graph as AOTAutograd traced it, and which of its inputs is which parameter."""

    graph: fx.GraphModule
    """Forward and backward in one graph, or forward alone."""
    refs: tuple[ParamRef | None, ...]
    """The parameter that each input of the whole model's graph is; None for data."""
    outputs: int | None
    """How many results are forward's; gradients follow. None: there is no backward."""
    static: tuple[int, ...] = ()
    """Positions of inputs that stay where they are between calls."""
    folds: tuple[Folded, ...] = ()
    """Layers that were left out of the graph, stack by stack."""
    written: tuple[int, ...] = ()
    """Positions of the inputs that get a new value after forward."""

    @property
    def traced_refs(self) -> tuple[ParamRef | None, ...]:
        """The parameters among the inputs that were traced."""
        return tuple(kept_of(self.folds, self.refs))


@dataclass(frozen=True)
class Partitioned:
    """Forward and backward of a step, or the one graph of an evaluation, with all layers."""

    graphs: Mapping[Phase, fx.GraphModule]
    outputs: int | None
    """How many results of forward are the caller's; the others are saved for backward. None: all of them."""
    dropped: frozenset[ParamRef] = frozenset()
    """Parameters of layers that were not traced: a program is not called with them."""
    layers_folded: int = 0
    recomputed: tuple[Recomputed, ...] = ()
    """What backward computes again to save memory, in the order in which it was chosen."""
    tighter: Callable[[], Partitioned | None] = lambda: None
    """The same with less saved for backward; None where nothing is left to compute again."""


@dataclass(frozen=True)
class Scheduled:
    """Graphs with their events in order, the memory planned for them, and the schedules they were recorded as."""

    graphs: Mapping[Phase, fx.GraphModule]
    memory: MemoryPlan
    outputs: int | None
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    """What the graphs do: ``train`` (and ``accumulate``), or ``eval``."""
    layers_folded: int = 0

    @property
    def name(self) -> str:
        """Under which name a model has the schedule."""
        return "train" if Phase.FORWARD in self.graphs else "eval"

    @property
    def schedule(self) -> Schedule:
        return self.schedules[self.name]
