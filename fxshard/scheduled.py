"""The graphs of a step, or of an evaluation, as the passes leave them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from fxshard._compat import Generated
from fxshard.events import Phase
from fxshard.inspect.schedule import Schedule
from fxshard.plan.memory import MemoryPlan


@dataclass(frozen=True)
class Scheduled:
    """Graphs with their events in order, and the memory that was planned for them."""

    graphs: Mapping[Phase, fx.GraphModule]
    memory: MemoryPlan
    outlines: dict[Phase, fx.GraphModule] = field(default_factory=dict)
    """Inputs and outputs of the graphs as AOTAutograd knows them, where it has not made the graphs itself."""
    outputs: int | None = None
    """How many results of forward are the caller's; the others are saved for backward. None: all of them."""
    left_out: int = 0
    """Layers that were not traced."""
    splits: Mapping[Phase, fx.GraphModule] = field(default_factory=dict)
    """The graphs cut into segments, where that was done at an earlier start."""
    recorded: Mapping[str, Schedule] = field(default_factory=dict)
    """What the graphs do, by name, where that was recorded at an earlier start."""
    generated: Mapping[str, Generated] = field(default_factory=dict)
    """What Inductor's cache has for the segments, by their structure, where an earlier start has compiled them."""

    @property
    def name(self) -> str:
        """Under which name a model has the schedule."""
        return "train" if Phase.FORWARD in self.graphs else "eval"
