"""``model.report``: what was captured, compiled and read, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fxshard.frontend.backend import Backend
from fxshard.frontend.sharding import Sharding
from fxshard.frontend.state import places
from fxshard.kernels.report import ExpertsReport
from fxshard.optim.fused_weights import Found, summary
from fxshard.runtime.replay import Captures
from fxshard.schedule.attention_report import AttentionReport
from fxshard.schedule.loss_report import LossReport
from fxshard.schedule.offloads import Offloaded
from fxshard.schedule.peak import Thing
from fxshard.schedule.schedule import size


@dataclass(frozen=True)
class Compilations:
    """How much was compiled."""

    segments: int
    """Stretches of compute between events."""
    compiled: int
    """Distinct ones among them, which were compiled."""
    captures: int
    """Graphs that Dynamo captured; grows when another input shape or mode is met."""
    layers_folded: int = 0
    """Layers that were not traced through autograd, because they are like those that were."""


@dataclass(frozen=True)
class Report:
    """What is known of a compiled model.

    >>> print(model.report)
    """

    compilations: Compilations
    graph_breaks: tuple[str, ...]
    """Where and why graphs ended before ``forward`` did; only with ``fullgraph=False``."""
    eager_reads: dict[str, str]
    """Parameters that code between graphs read, and the file and line that did; only with ``fullgraph=False``."""
    unused_parameters: list[str]
    """Parameters that no graph uses and no code between graphs read so far: they get zero or no gradients."""
    cuda_graphs: Captures | None
    """How often programs were captured, replayed, or ran through and why; None without ``cuda_graphs=True``."""

    attention: AttentionReport = field(default_factory=AttentionReport)
    """Which attention masks were recognised as causal, and which were kept, and why; of the graph captured last."""
    loss: LossReport = field(default_factory=LossReport)
    """Which losses are computed without logits, and which are not, and why; of the graph captured last."""
    splits: dict[str, Found] = field(default_factory=dict)
    """Weights that look fused to Muon: how they are cut before orthogonalisation, or why they are left whole."""
    shapes: tuple[str, ...] = ()
    """The shapes that each captured graph takes; ``any`` is a size that was left open, and needs no other graph."""
    largest: tuple[Thing, ...] = ()
    """The ten largest things in memory at the peak of a step, as planned; of the graph captured last."""
    offloaded: tuple[Offloaded, ...] = ()
    """Activations that are on the host from forward to backward; of the graph captured last."""
    experts: ExpertsReport = field(default_factory=ExpertsReport)
    """Which experts and dense MLPs were fused, by which implementation and why that one, and which were not; of the
    graph captured last. ``print(model.report.experts)`` has the latter, too."""
    state: str = ""
    """How optimizer state is kept, where ``"auto"`` left that to the planner: format, place, what that frees of the
    device, and how much longer updates take. Empty before a training step was planned."""

    def __str__(self) -> str:
        made = self.compilations
        lines = [
            f"{made.captures} graphs captured, {made.segments} segments, {made.compiled} of them compiled, "
            f"{made.layers_folded} layers not traced because they repeat others"
        ]
        if len(self.shapes) > 1 or any("any" in shapes for shapes in self.shapes):
            lines += [f"graph {i} takes {shapes}" for i, shapes in enumerate(self.shapes, 1)]
        lines += str(replace(self.experts, left=[])).splitlines() if self.experts.fused else []
        lines += str(self.attention).splitlines() if self.attention.found else []
        lines += str(self.loss).splitlines() if self.loss.chunked or self.loss.full else []
        lines += [f"at the peak: {thing}" for thing in self.largest]
        for out in self.offloaded:
            lines.append(f"on the host from forward to backward: {size(out.bytes)} {out.name} (of {out.count} values)")
        lines += [self.state] if self.state else []
        lines += summary(self.splits)
        lines += [f"graph break: {broken}" for broken in self.graph_breaks]
        lines += [f"read between graphs: {name} at {where}" for name, where in self.eager_reads.items()]
        lines += [f"not used: {name}" for name in self.unused_parameters]
        if self.cuda_graphs is not None:
            captures = self.cuda_graphs
            lines.append(f"CUDA graphs: {captures.captured} captured, {captures.replayed} replayed")
            lines += [f"ran through {times} times: {why}" for why, times in captures.run_through.items()]
        return "\n".join(lines)


def report_of(sharding: Sharding, backend: Backend, reads: dict[str, str], splits: dict[str, Found]) -> Report:
    """``reads``: parameters that code between graphs read, and where."""
    used = {sharding.plans[ref.bucket].params[ref.position] for ref in backend.used}
    names = [name for _, name, _ in places(sharding.buckets)]
    compiler, replays = sharding.compiler, sharding.engine.replays
    return Report(
        Compilations(compiler.segments, compiler.compilations, len(backend.captured), backend.layers_folded),
        tuple(backend.breaks),
        reads,
        [name for name in names if name not in used and name not in reads],
        replays.report() if replays is not None else None,
        backend.attention,
        backend.loss,
        splits,
        tuple(backend.captured),
        backend.largest(),
        backend.schedules["train"].offloaded if "train" in backend.schedules else (),
        backend.experts,
        sharding.state.described(sharding.hardware),
    )
