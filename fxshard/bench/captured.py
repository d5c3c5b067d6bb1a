"""A step captured once and scheduled many times: for any number of ranks, machine, budget and rule."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

import fxshard
from fxshard import captured_graph
from fxshard.config import AdamW, Muon
from fxshard.events import META, Kind, Phase, event_of, events
from fxshard.inspect.record import record, resident_bytes, stretches
from fxshard.inspect.schedule import Schedule
from fxshard.optim.muon_rule import matrices
from fxshard.passes import pipeline
from fxshard.passes.context import GRADS, PARAM, ParamRef, PassContext
from fxshard.passes.order_prefetch import order_prefetch
from fxshard.passes.plan_memory import plan_memory
from fxshard.plan import cost
from fxshard.plan.buckets import BucketPlan, plan_buckets
from fxshard.plan.hardware import Hardware
from fxshard.plan.hardware import hardware as known
from fxshard.plan.units import find_units

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
        given = replace(self.context.options, hardware=machine, **options)
        if fsdp2:
            given = replace(given, prefetch=1, keep_resident=False, defer_wgrad=False)
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
            budget=given.memory_budget,
            carry=memory.leading if optimizer is not None else 0,
        )

    def _insert(
        self, context: PassContext, zero: int, optimizer: AdamW | Muon | None
    ) -> tuple[tuple[BucketPlan, ...], Graphs]:
        """The part of scheduling that looks at every node, once; copies of its result are small."""
        owned = matrices(optimizer, self.model) if isinstance(optimizer, Muon) else ()
        key = (context.ranks, zero, context.options.defer_wgrad, tuple(owned))
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


class _Enough(Exception):
    """Thrown in place of scheduling: the graphs are there."""


def capture(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    zero: int = 3,
    precision: fxshard.Precision | None = None,
    lowering: str = "inductor",
    hardware: str | Hardware = "h200",
) -> Captured:
    """Capture a step once, by planning it up to where it would be scheduled."""
    found: list[tuple[Graphs, PassContext]] = []

    def keep(modules: Mapping[Phase, fx.GraphModule], context: PassContext, resident: int) -> Any:
        found.append((dict(modules), context))
        raise _Enough

    with mock.patch.object(captured_graph, "schedule", keep), _until(_Enough):
        fxshard.plan(model, inputs, world_size=2, zero=zero, precision=precision, lowering=lowering, hardware=hardware)
    ((graphs, context),) = found
    return Captured(model, graphs, context, precision, zero)


@contextmanager
def _until(kind: type[Exception]) -> Iterator[None]:
    """Swallow an exception, and those that Dynamo wraps around it."""
    try:
        yield
    except Exception as error:
        causes: list[BaseException | None] = [error]
        while causes[-1] is not None and not isinstance(causes[-1], kind):
            causes.append(causes[-1].__cause__ or getattr(causes[-1], "inner_exception", None))
        if causes[-1] is None:
            raise


def _fsdp2(modules: Graphs, context: PassContext, resident: int) -> tuple[Graphs, Any]:
    """Each gather starts when the bucket before it is in use, and what forward uses last stays for backward."""
    for phase, module in modules.items():
        modules[phase] = order_prefetch(module, replace(context, phase=phase))
    last = [event for _, event in events(modules[Phase.FORWARD].graph) if event.kind is Kind.WAIT][-1].bucket_index
    for phase, kind in ((Phase.FORWARD, Kind.RESHARD), (Phase.BACKWARD, Kind.UNSHARD)):
        for node, event in list(events(modules[phase].graph)):
            if event.kind is kind and event.bucket_index == last:
                modules[phase].graph.erase_node(node)
    return modules, plan_memory(modules, context)
