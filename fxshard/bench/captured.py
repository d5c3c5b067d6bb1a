"""A step captured once and scheduled many times: for any number of ranks, machine, budget and rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from torch import fx, nn

import fxshard
from fxshard._torch import private
from fxshard.bench.models import LanguageModel
from fxshard.frontend.absent_layers import AbsentLayers, LayersDifferError
from fxshard.frontend.planning import partition_model
from fxshard.frontend.sharding import plan_model
from fxshard.optim.config import AdamW, Muon, state_choice
from fxshard.optim.muon_rule import matrices
from fxshard.passes import pipeline
from fxshard.passes.context import PassContext
from fxshard.passes.decide import Decisions, decide
from fxshard.passes.fit_budget import Split, fit_budget
from fxshard.passes.options import Options
from fxshard.passes.order_collectives import order_collectives
from fxshard.passes.order_prefetch import order_prefetch
from fxshard.passes.plan_memory import plan_memory, with_slots
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.passes.stages import Partitioned
from fxshard.passes.timeline import Timeline
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.buckets import plan_buckets
from fxshard.planner.cost import node_traffic
from fxshard.planner.domain import Domain, data_parallel
from fxshard.planner.hardware import Hardware
from fxshard.planner.hardware import hardware as known
from fxshard.planner.units import find_units
from fxshard.schedule.events import Kind, Phase
from fxshard.schedule.params import GRADS, PARAM, ParamRef
from fxshard.schedule.schedule import Schedule

Graphs = dict[Phase, fx.GraphModule]


@dataclass(frozen=True)
class Captured:
    """A step as graphs without events: what no choice of ranks, budget or machine changes, as long as the machine has
    the kernels (the compute capability) of the one it was captured for."""

    model: nn.Module
    partitions: list[Partitioned]
    """The step as it was partitioned, then with less and less saved for backward, as far as budgets asked for it."""
    context: PassContext
    precision: fxshard.Precision | None
    zero: int
    inserted: dict[Any, Split] = field(default_factory=dict)
    """{what events depend on, and how often it was partitioned: the events of a step}"""

    def buckets(
        self, *, ranks: int, zero: int, replicas: int = 1, stride: int = 1, optimizer: Any = None, **_: Any
    ) -> tuple[BucketPlan, ...]:
        """The buckets of a schedule with these options."""
        domain = data_parallel(ranks // replicas, replicas, "mean", "cuda", stride)
        return self._buckets(zero, domain, matrices(optimizer, self.model) if isinstance(optimizer, Muon) else ())

    def _buckets(self, zero: int, domain: Domain, owned: Iterable[str]) -> tuple[BucketPlan, ...]:
        return plan_buckets(
            self.model,
            find_units(self.model),
            zero=zero,
            ranks=domain.shards,
            precision=self.precision,
            matrices=tuple(owned),
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
        """The schedule that ``fxshard.plan`` gives. ``fsdp2``: ordered by FSDP2's rule, one ahead, the last one kept.

        ``replicas``: of each shard, among the ``ranks``; ``stride``: how many ranks apart neighbouring shards are.
        """
        machine = known(hardware)
        debug = fxshard.Debug(prefetch=1, keep_resident=False, defer_wgrad=False) if fsdp2 else fxshard.Debug()
        settings = {"zero": self.zero if zero is None else zero, "hardware": machine, "debug": debug, **options}
        given = replace(self.context.options, **settings)
        context = replace(
            self.context,
            options=given,
            group=f"cuda×{ranks}",
            ranks=ranks,
            hardware=machine,
            state=state_choice(optimizer),
        )
        domain = data_parallel(ranks // replicas, replicas, "mean", "cuda", stride)
        splits = self._splits(context, optimizer, domain)
        if given.budget is not None:
            fit = fit_budget(splits, given.budget)
            return fit.split.scheduled(fit.decisions, fit.kept)
        first = next(splits)
        decisions = _fsdp2(first.draft.timeline, first.context) if fsdp2 else decide(first.orders)
        return first.scheduled(decisions, first.ways()[0])

    def _splits(self, context: PassContext, optimizer: AdamW | Muon | None, domain: Domain) -> Iterator[Split]:
        """The part of scheduling that looks at every node, once."""
        owned = matrices(optimizer, self.model) if isinstance(optimizer, Muon) else ()
        zero = context.options.zero
        key = (domain, zero, context.options.debug.defer_wgrad, tuple(owned))
        for number in count():
            if (key, number) not in self.inserted:
                partitioned = self._partition(number)
                if partitioned is None:
                    return
                frame = replace(context, buckets=self._buckets(zero, domain, owned))
                graphs = {phase: private.copied(module) for phase, module in partitioned.graphs.items()}
                self._tie(graphs, frame.buckets)
                made = pipeline.insert_events(graphs, frame)
                self.inserted[key, number] = Split.of(made, frame, False, partitioned.outputs, partitioned.recomputed)
            split = self.inserted[key, number]
            frame = replace(context, buckets=split.context.buckets)
            yield replace(split, context=frame, carries=optimizer is not None)

    def _partition(self, number: int) -> Partitioned | None:
        while len(self.partitions) <= number:
            tighter = self.partitions[-1].tighter()
            if tighter is None:
                return None
            self.partitions.append(_prepared(tighter, self.context))
        return self.partitions[number]

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
    budgeted = replace(options, memory_budget=1)  # so that it can be partitioned again with less saved
    buckets = plan_model(model, [data_parallel(2, 1, "mean", "cuda")], options)
    plan = ShardingPlan(buckets, budgeted, ranks=2, hardware=machine, one_graph=True, planned_experts="auto")
    partitioned = _partitioned(model, inputs, plan)
    context = replace(plan, options=options).context(next(iter(partitioned.graphs)))
    return Captured(model, [_prepared(partitioned, context)], context, precision, zero)


def _partitioned(model: nn.Module, inputs: Sequence[Any], plan: ShardingPlan) -> Partitioned:
    # A LanguageModel calls its layers one after the other, and makes them alike, some of the first ones apart.
    absent = AbsentLayers.of("layers", len(model.layers)) if isinstance(model, LanguageModel) else None
    try:
        return partition_model(model, inputs, plan, absent=absent)
    except LayersDifferError:
        return partition_model(model, inputs, plan)


def _prepared(partitioned: Partitioned, context: PassContext) -> Partitioned:
    """The passes that do not depend on buckets, run in place before graphs are copied for each choice of buckets."""
    for phase, module in partitioned.graphs.items():
        order_collectives(module, replace(context, phase=phase))
        for node in module.graph.nodes:
            node_traffic(node)  # noted on it
    return partitioned


def _fsdp2(timeline: Timeline, context: PassContext) -> Decisions:
    """Each gather starts when the bucket before it is in use, and what forward uses last stays for backward."""
    ordered = timeline.each(lambda part: order_prefetch(part, depth=1))
    waits = (e for e in ordered.events if e.kind is Kind.WAIT and e.phase is Phase.FORWARD)
    last = [event.bucket_index for event in waits][-1]
    ordered = ordered.keeping({last})
    memory = plan_memory(ordered, context.buckets)
    return Decisions(with_slots(ordered, context.buckets, memory), frozenset({last}), memory)
