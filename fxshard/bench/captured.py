"""A step captured once and scheduled many times: for any number of ranks, machine, budget and rule."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Collection, Mapping, Sequence
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
from fxshard.plan.domain import Domain, data_parallel
from fxshard.plan.hardware import Hardware
from fxshard.plan.hardware import hardware as known
from fxshard.plan.units import find_units
from fxshard.schedule.collectives import GROUP
from fxshard.schedule.events import META, OF_MODEL, Kind, Phase, event_of
from fxshard.schedule.params import GRADS, PARAM, ParamRef
from fxshard.schedule.record import record, resident_bytes, stretches
from fxshard.schedule.schedule import Schedule

Graphs = dict[Phase, fx.GraphModule]
HELD = "held"
"""Key of ``node.meta``: activations alive after a stretch of compute."""


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

    @property
    def activation_bytes(self) -> int:
        """The most that activations take at the end of a stretch of compute, in any schedule so far."""
        graphs = [module.graph for _, modules in self.inserted.values() for module in modules.values()]
        return max((node.meta[HELD] for graph in graphs for node in graph.nodes if HELD in node.meta), default=0)

    def buckets(
        self, *, ranks: int, zero: int, replicas: int = 1, stride: int = 1, optimizer: Any = None, **_: Any
    ) -> tuple[BucketPlan, ...]:
        """Those of a schedule with these options."""
        domain = data_parallel(ranks // replicas, replicas, "mean", "cuda", stride)
        return self._buckets(zero, domain, matrices(optimizer, self.model) if isinstance(optimizer, Muon) else ())

    def _buckets(self, zero: int, domain: Domain, owned: Collection[str]) -> tuple[BucketPlan, ...]:
        return plan_buckets(
            self.model,
            find_units(self.model),
            zero=zero,
            ranks=domain.shards,
            precision=self.precision,
            matrices=owned,
            domain_of=lambda name: domain,
        )

    def schedule(
        self,
        *,
        ranks: int,
        hardware: str | Hardware,
        zero: int | None = None,
        replicas: int = 1,
        stride: int = 1,
        optimizer: AdamW | Muon | None = None,
        fsdp2: bool = False,
        **options: Any,
    ) -> Schedule:
        """As ``fxshard.plan`` gives it. With ``fsdp2``, ordered by its rule: one ahead, and the last bucket kept.

        ``replicas``: of each shard, among the ``ranks``; ``stride``: how many ranks apart neighbouring shards are.
        """
        stage = self.zero if zero is None else zero
        machine = known(hardware)
        debug = fxshard.Debug(prefetch=1, keep_resident=False, defer_wgrad=False) if fsdp2 else fxshard.Debug()
        given = replace(self.context.options, hardware=machine, **{"debug": debug, **options})
        context = replace(self.context, options=given, group=f"cuda×{ranks}", ranks=ranks, hardware=machine)
        domain = data_parallel(ranks // replicas, replicas, "mean", "cuda", stride)
        context.buckets, graphs = self._insert(context, stage, optimizer, domain)
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
        self, context: PassContext, zero: int, optimizer: AdamW | Muon | None, domain: Domain
    ) -> tuple[tuple[BucketPlan, ...], Graphs]:
        """The part of scheduling that looks at every node, once; copies of its result are small."""
        owned = matrices(optimizer, self.model) if isinstance(optimizer, Muon) else ()
        key = (domain, zero, context.options.debug.defer_wgrad, tuple(owned))
        if key not in self.inserted:
            buckets = self._buckets(zero, domain, owned)
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
            node = _own(short, part, sources) if event.kind in OF_MODEL else None
            if node is None:
                node = short.call_function(part.target, part.args, part.kwargs)  # type: ignore[arg-type]
            node.meta[META] = event
            sources[event.kind, event.bucket_index if event.bucket_index >= 0 else event.number] = node
            continue
        reads = [short.call_function(operator.getitem, (sources[Kind.WAIT, index], 0)) for index in part.reads]
        node = short.call_function(compute, tuple(reads))
        node.meta = {
            HELD: part.held,
            cost.FLOPS: part.flops,
            "val": torch.empty(part.traffic, dtype=torch.uint8, device="meta"),
        }
        for index in part.writes:
            view = short.call_function(operator.getitem, (sources[Kind.GRAD, index], 0))
            write = short.call_function(torch.ops.aten.copy_.default, (view, view))
            write.meta[cost.FLOPS] = 0
    short.output(())
    return fx.GraphModule(nn.Module(), short)


def _own(short: fx.Graph, part: fx.Node, sources: Mapping[tuple[Kind, int], fx.Node]) -> fx.Node:
    """A collective of the model's own, of an input of the graph in place of what is computed, or the wait for it."""
    event = part.meta[META]
    if event.kind is Kind.AWAIT:
        return short.call_function(part.target, (sources[Kind.COLLECTIVE, event.number],))  # type: ignore[arg-type]
    first = next(iter(short.nodes), None)
    with short.inserting_before(first) if first is not None else contextlib.nullcontext():
        given = short.placeholder(f"sent_{event.number}")
    given.meta["val"] = part.all_input_nodes[0].meta["val"]
    args = fx.map_arg(part.args, lambda node: given)
    node = short.call_function(part.target, args)  # type: ignore[arg-type]
    node.meta |= {"val": part.meta["val"], GROUP: part.meta[GROUP]}
    return node


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
