"""What a pass is told besides its graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxshard.kernels.report import ExpertsReport
from fxshard.passes.options import Options
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.hardware import Hardware
from fxshard.planner.head_rows import AttentionHeads
from fxshard.planner.state import StateChoice
from fxshard.schedule.attention_report import AttentionReport
from fxshard.schedule.events import Phase
from fxshard.schedule.loss_report import LossReport
from fxshard.schedule.observe import Observer
from fxshard.schedule.params import ParamRef
from fxshard.schedule.profile import Profile


@dataclass
class PassContext:
    """The frame in which the passes over one captured graph work."""

    buckets: tuple[BucketPlan, ...]
    options: Options
    phase: Phase
    group: str = "none"
    ranks: int = 1
    hardware: Hardware | None = None
    """The machine whose durations the schedule is made for."""
    profile: Profile | None = None
    """Recorded durations, which count more than estimates."""
    experts: ExpertsReport = field(default_factory=ExpertsReport)
    """What the passes before autograd made of mixture-of-experts layers."""
    attention: AttentionReport = field(default_factory=AttentionReport)
    """What the passes before autograd made of attention masks."""
    loss: LossReport = field(default_factory=LossReport)
    """What the passes before autograd made of losses."""
    state: StateChoice = field(default_factory=StateChoice)
    """What may become of optimizer state; the buckets have what is taken where memory does not matter."""
    measures_logits: bool = False
    """Whether the optimizer clips the logits of attention, and has to know their largest."""
    heads: list[AttentionHeads] = field(default_factory=list)
    """Whose largest logits the captured graph returns after its own results, in order."""
    ends_early: bool = False
    """Whether Dynamo ended the captured graph before the model did, so that the model's own code reads its results."""
    planned_experts: str | None = None
    """In a plan for another machine, ``hardware``: the option ``experts`` of the run."""
    observer: Observer | None = None
    """Logs and writes down what passes do, where that is asked for."""

    def bucket(self, ref: ParamRef) -> BucketPlan:
        return self.buckets[ref.bucket]

    def say(self, message: str, *values: object) -> None:
        """Log a line, where the compilation is watched."""
        if self.observer is not None:
            self.observer.say(message, *values)
