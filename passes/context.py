"""What a pass is told besides its graph, and how parameters are recognised in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fxshard.config import Options
from fxshard.events import Phase
from fxshard.fused.report import ExpertsReport
from fxshard.inspect.observe import Observer
from fxshard.plan.buckets import BucketPlan
from fxshard.plan.hardware import Hardware
from fxshard.profile import Profile

PARAM = "fxshard_param"
"""Key of ``node.meta`` that ties a graph input to its parameter. Set once on the joint graph, by position."""

GRADS = "fxshard_grads"
"""Key of the backward output's ``node.meta``: the :class:`ParamRef` (or None) whose gradient each output is."""


@dataclass(frozen=True, order=True)
class ParamRef:
    """A parameter as (bucket, position in the bucket's layout)."""

    bucket: int
    position: int


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
    ahead: int = 1
    """How many gathers may run ahead of the one in use."""
    by_deadline: bool = False
    """Whether gathers start as late as durations allow, instead of as early as ``ahead`` does."""
    leading: int = 1
    """How many gathers forward starts with, whatever durations say."""
    arena_budget: int | None = None
    """Bytes the arena may have; None means as few as the step needs."""
    experts: ExpertsReport = field(default_factory=ExpertsReport)
    """What the passes before autograd made of mixture-of-experts layers."""
    planned_experts: str | None = None
    """In a plan for another machine, ``hardware``: the option ``experts`` of the run."""
    observer: Observer | None = None
    """Who logs and writes down what passes do, where somebody asked for it."""

    def bucket(self, ref: ParamRef) -> BucketPlan:
        return self.buckets[ref.bucket]


def param_inputs(graph: fx.Graph) -> dict[fx.Node, ParamRef]:
    """The placeholders that stand for sharded parameters."""
    return {node: node.meta[PARAM] for node in graph.find_nodes(op="placeholder") if node.meta.get(PARAM) is not None}
