"""What scheduling a graph depends on besides the graph. Frozen, picklable, and the same on every rank."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from fxshard.passes.context import PassContext
from fxshard.passes.options import Options
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.hardware import Hardware
from fxshard.planner.state import StateChoice
from fxshard.schedule.events import Phase
from fxshard.schedule.observe import Observer
from fxshard.schedule.params import ParamRef
from fxshard.schedule.profile import Profile


@dataclass(frozen=True)
class ShardingPlan:
    """Where a model's parameters live, and what was chosen for its schedule."""

    buckets: tuple[BucketPlan, ...]
    options: Options
    group: str = "none"
    """The process group of buckets that do not say which theirs is."""
    ranks: int = 1
    hardware: Hardware | None = None
    """The machine whose durations the schedule is made for."""
    profile: Profile | None = None
    """Recorded durations that replace estimates."""
    own_optimizer: bool = False
    """Whether one of fxshard's optimizers updates the model."""
    one_graph: bool = False
    """Whether the whole model is one graph, so that an optimizer step may start the next forward's gathers."""
    measures_logits: bool = False
    """Whether the optimizer clips the logits of attention."""
    planned_experts: str | None = None
    """The option ``experts`` that a run will have, if this is only planned."""
    state: StateChoice = field(default_factory=StateChoice)
    """What may become of optimizer state under a memory budget."""

    def context(self, phase: Phase, observer: Observer | None = None) -> PassContext:
        """What passes are told."""
        return PassContext(
            self.buckets,
            self.options,
            phase,
            self.group,
            ranks=self.ranks,
            hardware=self.hardware,
            profile=self.profile,
            measures_logits=self.measures_logits,
            planned_experts=self.planned_experts,
            state=self.state,
            observer=observer,
        )

    def kind(self, ref: ParamRef) -> Hashable:
        """What must be equal for two parameters to take each other's place in two layers that repeat."""
        bucket = self.buckets[ref.bucket]
        shape = bucket.layout.slots[ref.position].spec.shape
        return bucket.gather, bucket.param_dtype, bucket.trainable, bucket.resident, tuple(shape)
