"""Optimizer state that is left to the planner: how it is kept is decided when a graph is planned, and done before that
first runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fxshard.optim.sharded import ShardedOptimizer
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.hardware import Hardware, hardware
from fxshard.planner.kept_state import KeptState, kept_state
from fxshard.planner.state import StateChoice
from fxshard.schedule.events import Phase
from fxshard.schedule.schedule import Schedule, size


def state_line(buckets: Sequence[BucketPlan], hardware: Hardware) -> str:
    """Format and place, what they free on the device, and what they cost."""
    kept = kept_state(buckets, hardware)
    plain = [replace(bucket, state="fp32", offload="none") for bucket in kept.trained]
    freed = sum(bucket.moment_bytes for bucket in plain) - kept.device_bytes
    if not freed:
        return f"optimizer state: {kept}, {size(kept.device_bytes)}"
    held = f"{size(kept.device_bytes)} on the device" + f", {size(kept.host_bytes)} on the host" * bool(kept.on_host)
    cost = f", for updates that take {kept.seconds * 1e3:.1f} ms longer" if kept.on_host else ""
    return f"optimizer state: {kept}: {held}; it frees {size(freed)} of the device{cost}"


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
