"""Optimizer state that is left to the planner: how it is kept is decided when a graph is planned, and done before that
first runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fxshard.optim.sharded import ShardedOptimizer
from fxshard.plan.buckets import BucketPlan
from fxshard.plan.hardware import Hardware, hardware
from fxshard.plan.kept_state import KeptState
from fxshard.plan.state import StateChoice
from fxshard.schedule.events import Phase
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.state_report import state_line


@dataclass
class StateDecision:
    """What may still become of optimizer state. Every graph that is planned under a memory budget narrows it."""

    choice: StateChoice = field(default_factory=StateChoice)
    buckets: tuple[BucketPlan, ...] = ()
    """With what was decided so far."""
    made: bool = True
    """Whether a training step was planned; until then there is no need for memory on the device."""
    asked: bool = False
    """Whether there is something to decide, or was."""
    optimizer: ShardedOptimizer | None = None

    @classmethod
    def of(cls, choice: StateChoice, buckets: tuple[BucketPlan, ...], budget: int | None) -> StateDecision:
        """Without a budget there is nothing to decide."""
        choice = choice.first if budget is None else choice
        return cls(choice, buckets, made=not choice.open, asked=choice.open)

    def take(self, planned: Schedule) -> None:
        """Take over how a planned step keeps optimizer state: no graph after it may plan with more on the device.

        The first training step decides about the format. A later graph may send more to the host, also on one rank
        alone: no bit changes. An evaluation decides nothing unless it has to.
        """
        if not self.choice.open:
            return
        kept = KeptState(planned.buckets)
        self.choice = replace(self.choice, most_bytes=kept.device_bytes)
        if any(graph.phase is Phase.BACKWARD for graph in planned.graphs):
            self.choice, self.made = replace(self.choice, format=kept.format), True
        if self.made:
            self.buckets = kept.buckets

    def lines(self) -> list[str]:
        """What ranks must agree on."""
        return [f"optimizer state in {KeptState(self.buckets).format}"] if self.asked and self.made else []

    def described(self, machine: Hardware | None) -> str:
        """What was decided, in a line; empty where nothing was left to decide, or nothing is decided yet."""
        return state_line(self.buckets, machine or hardware("h200")) if self.asked and self.made else ""

    def apply(self) -> None:
        """Make the optimizer keep its state as it was decided."""
        if self.asked and self.made and self.optimizer is not None:
            self.optimizer.keep(self.buckets)
