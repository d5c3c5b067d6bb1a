"""A step captured once and scheduled many times: for any number of ranks, machine, budget and rule."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

import fxshard
from fxshard.frontend.planning import partition_model
from fxshard.frontend.sharding import plan_model
from fxshard.optim.config import AdamW, Muon
from fxshard.optim.muon_rule import matrices
from fxshard.passes import pipeline
from fxshard.passes.apply_decisions import apply_decisions
from fxshard.passes.context import PassContext
from fxshard.passes.decide import Decisions
from fxshard.passes.options import Options
from fxshard.passes.order_prefetch import order_prefetch
from fxshard.passes.plan_memory import plan_memory, with_slots
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.passes.timeline import Timeline
from fxshard.plan import cost
from fxshard.plan.buckets import BucketPlan, plan_buckets
from fxshard.plan.domain import data_parallel
from fxshard.plan.hardware import Hardware
from fxshard.plan.hardware import hardware as known
from fxshard.plan.units import find_units
from fxshard.schedule.events import META, Kind, Phase, event_of
from fxshard.schedule.params import GRADS, PARAM, ParamRef
from fxshard.schedule.record import record, resident_bytes, stretches
from fxshard.schedule.schedule import Schedule

Graphs = dict[Phase, fx.GraphModule]


@dataclass(frozen=True)
class Captured:
    """A step as graphs without events: what no choice of ranks, budget or machine changes, as long as the machine has
    the kernels (the compute capability) of the one it was captured for."""

    model: nn.Module
    graphs: Graphs
    context: PassContext
    precision: fxshard.Precision | None
    zero: int
    inserted: dict[Any, tuple[tuple[BucketPlan, ...], Graphs]] = field(default_factory=dict)
    """{what events depend on: buckets, and graphs of events with one node for each stretch of compute}"""

    def schedule(
        self,
        *,
        ranks: int,
        hardware: str | Hardware,
        zero: int | None = None,
        optimizer: AdamW | Muon | None = None,
        fsdp2: bool = False,
        **options: Any,
    ) -> Schedule:
        """As ``fxshard.plan`` gives it. With ``fsdp2``, ordered by its rule: one ahead, and the last bucket kept."""
        stage = self.zero if zero is None else zero
        machine = known(hardware)
        debug = fxshard.Debug(prefetch=1, keep_resident=False, defer_wgrad=False) if fsdp2 else fxshard.Debug()
        given = replace(self.context.options, hardware=machine, **{"debug": debug, **options})
        context = replace(self.context, options=given, group=f"cuda×{ranks}", ranks=ranks, hardware=machine)
        context.buckets, graphs = self._insert(context, stage, optimizer)
        run = _fsdp2 if fsdp2 else pipeline.order
        scheduled, memory = run(graphs, context, resident_bytes(context.buckets))
        return record(
            scheduled,
            context.buckets,
            memory,
            ranks=ranks,
            zero=stage,
            budget=given.budget,
            carry=memory.leading if optimizer is not None else 0,
        )

    def _insert(
        self, context: PassContext, zero: int, optimizer: AdamW | Muon | None
    ) -> tuple[tuple[BucketPlan, ...], Graphs]:
        """The part of scheduling that looks at every node, once; copies of its result are small."""
        owned = matrices(optimizer, self.model) if isinstance(optimizer, Muon) else ()
        key = (context.ranks, zero, context.options.debug.defer_wgrad, tuple(owned))
        if key not in self.inserted:
            buckets = plan_buckets(
                self.model,
                find_units(self.model),
                zero=zero,
                ranks=context.ranks,
                precision=self.precision,
                matrices=owned,
            )
            graphs = _copies(self.graphs)
            self._tie(graphs, buckets)
            graphs = pipeline.insert_events(graphs, replace(context, buckets=buckets))
            self.inserted[key] = buckets, {phase: condense(module.graph, phase) for phase, module in graphs.items()}
        buckets, graphs = self.inserted[key]
        return buckets, _copies(graphs)

    def _tie(self, graphs: Graphs, buckets: Sequence[BucketPlan]) -> None:
        """Graphs were captured for some buckets; the same parameters have other places in others."""
        places = {name: ParamRef(b.index, i) for b in buckets for i, name in enumerate(b.params)}

        def now(ref: ParamRef | None) -> ParamRef | None:
            return None if ref is None else places[self.context.buckets[ref.bucket].params[ref.position]]

        for module in graphs.values():
            for node in module.graph.find_nodes(op="placeholder"):
                node.meta[PARAM] = now(node.meta.get(PARAM))
            output = module.graph.output_node()
            if GRADS in output.meta:
                output.meta[GRADS] = tuple(now(ref) for ref in output.meta[GRADS])


def _copies(graphs: Graphs) -> Graphs:
    return {phase: fx.GraphModule(module, copy.deepcopy(module.graph)) for phase, module in graphs.items()}


def compute(*reads: torch.Tensor) -> None:
    """Stands for a stretch of compute."""


def condense(graph: fx.Graph, phase: Phase) -> fx.GraphModule:
    """The same events, and one node for each stretch of compute between them, with its operations and traffic.

    Gathers are never moved into a stretch, so the schedule is that of the whole graph. Activations are left out.
    """
    short = fx.Graph()
    sources: dict[tuple[Kind, int], fx.Node] = {}
    for part in stretches(graph, phase):
        if isinstance(part, fx.Node):
            event = event_of(part)
            assert event is not None
            node = short.call_function(part.target, part.args, part.kwargs)  # type: ignore[arg-type]
            node.meta[META] = event
            sources[event.kind, event.bucket_index] = node
            continue
        reads = [short.call_function(operator.getitem, (sources[Kind.WAIT, index], 0)) for index in part.reads]
        node = short.call_function(compute, tuple(reads))
        node.meta = {cost.FLOPS: part.flops, "val": torch.empty(part.traffic, dtype=torch.uint8, device="meta")}
        for index in part.writes:
            view = short.call_function(operator.getitem, (sources[Kind.GRAD, index], 0))
            write = short.call_function(torch.ops.aten.copy_.default, (view, view))
            write.meta[cost.FLOPS] = 0
    short.output(())
    return fx.GraphModule(nn.Module(), short)


def capture(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    zero: int = 3,
    precision: fxshard.Precision | None = None,
    lowering: str = "inductor",
    hardware: str | Hardware = "h200",
) -> Captured:
    """Capture a step once, as planning does."""
    machine = known(hardware)
    options = Options(zero=zero, precision=precision, lowering=lowering, hardware=machine, experts="torch")
    buckets = plan_model(model, [data_parallel(2, 1, "mean", "cuda")], options)
    plan = ShardingPlan(buckets, options, ranks=2, hardware=machine, one_graph=True, planned_experts="auto")
    partitioned = partition_model(model, inputs, plan)
    context = plan.context(next(iter(partitioned.graphs)))
    return Captured(model, dict(partitioned.graphs), context, precision, zero)


def _fsdp2(modules: Graphs, context: PassContext, resident: int) -> tuple[Graphs, Any]:
    """Each gather starts when the bucket before it is in use, and what forward uses last stays for backward."""
    ordered = Timeline.of(modules).each(lambda part: order_prefetch(part, depth=1))
    last = [event for event in ordered.events if event.kind is Kind.WAIT and event.phase is Phase.FORWARD][
        -1
    ].bucket_index
    ordered = ordered.keeping(last)
    memory = plan_memory(ordered, context.buckets)
    timeline = with_slots(ordered, context.buckets, memory)
    apply_decisions(modules, Decisions(timeline, frozenset({last}), memory))
    return modules, memory
