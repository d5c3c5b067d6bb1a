"""Step, under a memory budget: what backward computes again, what is on the host, and what the arena may take, so that
all of it fits.

Requires graphs that can be split again with less saved (``Partitioned.tighter``). The splits are tried from the one
that saves most, each as it is and with saved values on the host; for each, arenas of several sizes. Which there are
does not depend on the budget, and of those that fit, the one with the shortest simulated step is taken: more memory
never makes a slower step. Once the fastest order of a split fits, nothing that holds less is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from torch import fx

from fxshard._torch import private
from fxshard._torch.errors import BudgetError
from fxshard.passes.context import PassContext
from fxshard.passes.decide import Decisions, decide, least_arena
from fxshard.passes.draft import Draft
from fxshard.passes.fill_arena import leading_bytes
from fxshard.passes.offload_saved import offload_saved, saved_kinds
from fxshard.plan.hardware import Hardware, hardware
from fxshard.schedule.events import Phase
from fxshard.schedule.offloads import Offloaded
from fxshard.schedule.recomputed import Recomputed
from fxshard.schedule.record import resident_bytes
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.simulate import Simulation, simulate

GROWTH = 2
"""From what is added to the smallest arena to what is added for the next try."""

Graphs = dict[Phase, fx.GraphModule]


@dataclass(frozen=True)
class Split:
    """Forward and backward of a step with their events, and how much they hold."""

    graphs: Graphs
    draft: Draft
    context: PassContext
    carries: bool
    """Whether an optimizer step may start gathers of the next forward."""
    symbolic: bool = False
    """Whether sizes are open."""
    recomputed: tuple[Recomputed, ...] = ()
    offloaded: tuple[Offloaded, ...] = ()
    decided: dict[Any, Decisions] = field(default_factory=dict, compare=False, repr=False)
    """Decisions that were made, by what they depend on: several budgets ask for the same."""
    simulations: dict[Any, Simulation] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, graphs: Graphs, context: PassContext, carries: bool, recomputed: tuple[Recomputed, ...] = ()) -> Split:
        values = [node.meta.get("val") for each in graphs.values() for node in each.graph.find_nodes(op="placeholder")]
        symbolic = any(map(private.free_symbols, values))
        return cls(graphs, Draft.of(graphs, context.options.fused), context, carries, symbolic, recomputed)

    @property
    def machine(self) -> Hardware:
        return self.context.hardware or hardware("h200")

    def variants(self, outputs: int | None) -> Iterator[Split]:
        """As it is, and with more and more of what is saved on the host."""
        yield self
        if outputs is not None:
            yield from self._offloading(outputs)

    def _offloading(self, outputs: int) -> Iterator[Split]:
        """``outputs``: forward's results that are not saved.

        Where everything is saved, kind after kind; where backward computes things again already, as much as forward
        hides and as much as there is. Not values whose sizes are open: places on the host have a size.
        """
        asked, graphs = self.context.options.activations, self.graphs
        own_memory = self.machine.host_bandwidth > 0 and not self.context.options.cuda_graphs
        if asked == "recompute" or not (own_memory or asked == "offload") or len(graphs) < 2:
            return
        kinds = saved_kinds(graphs, outputs, self.machine)
        computed = [event for _, event in self.draft.stretches[Phase.FORWARD]]
        forward = sum(self.machine.compute_seconds(e.flops, e.traffic, e.dtype, e.float8_flops) for e in computed)
        copying = list(accumulate(kind.offloaded.seconds for kind in kinds))
        counts = list(range(1, len(kinds) + 1))
        if self.recomputed:
            counts = sorted({sum(seconds <= forward for seconds in copying), len(kinds)} - {0})
        for count in counts:
            offloaded = tuple(kind.offloaded for kind in kinds[:count])
            made = offload_saved(graphs, kinds[:count])
            yield replace(Split.of(made, self.context, self.carries, self.recomputed), offloaded=offloaded)

    @cached_property
    def least(self) -> int:
        """The smallest arena, in bytes."""
        return least_arena(self.draft.timeline, self.context)

    @property
    def taken(self) -> int:
        """What a rank holds besides the arena."""
        return resident_bytes(self.context.buckets) + self.draft.activations

    def arenas(self) -> Iterator[int]:
        """Sizes to try, from the smallest to one in which everything has a place.

        Where sizes are open, ranks may have other ones, and must gather the same: no more than without a budget.
        """
        yield self.least
        if self.symbolic:
            return
        most = 2 * sum(bucket.gathered_bytes + bucket.grad_bytes for bucket in self.context.buckets)
        more = max((bucket.gathered_bytes for bucket in self.context.buckets), default=0)
        while 0 < more < most:
            yield self.least + more
            more *= GROWTH
        yield self.least + most

    def decide(self, arena: int | None) -> Decisions:
        key = arena, self.context.options.debug, self.context.hardware
        if key not in self.decided:
            self.decided[key] = decide(self.draft.timeline, replace(self.context, observer=None), arena)
        return self.decided[key]

    def options(self) -> Iterator[Decisions]:
        """Orders of the events, those without a budget's rules among them; each once."""
        tried: list[Decisions] = []
        for arena in (*self.arenas(), None):
            decisions = self.decide(arena)
            if decisions not in tried:
                tried.append(decisions)
                yield decisions

    def needs(self, decisions: Decisions) -> int:
        """What a rank may hold. Gathers that an optimizer step starts may have to be moved out of the arena."""
        memory = decisions.memory
        return self.taken + memory.bytes + leading_bytes(decisions.timeline, memory.leading)

    def scheduled(self, decisions: Decisions) -> Schedule:
        """What the graphs will do, once they are what was decided."""
        made = self.draft.decided(decisions, self.context, self.carries)
        return replace(made, recomputed=self.recomputed, offloaded=self.offloaded)

    def simulated(self, decisions: Decisions) -> Simulation:
        # By the cost model alone: recorded durations differ between ranks, and what is gathered must not.
        key = id(decisions), self.machine, self.carries  # which are kept
        if key not in self.simulations:
            self.simulations[key] = simulate(self.scheduled(decisions), self.machine)
        return self.simulations[key]

    def seconds(self, decisions: Decisions) -> float:
        return self.simulated(decisions).step_seconds

    def fastest(self, budget: int) -> Fit | None:
        """The fastest order of events that fits."""
        best: Decisions | None = None
        too_large: list[Decisions] = []
        for decisions in self.options() if self.taken + self.least <= budget else ():
            if self.needs(decisions) > budget:
                too_large.append(decisions)
            elif best is None or self.seconds(decisions) < self.seconds(best):
                best = decisions
                if self.simulated(best).exposed_seconds <= 0:
                    return Fit(self, best, unlimited=True)
        if best is None:
            return None
        # Where sizes are open, no larger arena may be used.
        limited = not self.symbolic and any(self.seconds(other) < self.seconds(best) for other in too_large)
        return Fit(self, best, not limited)


@dataclass(frozen=True)
class Fit:
    """What was chosen: a split, and the order of its events within an arena."""

    split: Split
    decisions: Decisions
    unlimited: bool
    """Whether no larger arena makes the split faster."""

    @property
    def seconds(self) -> float:
        """Of the simulated step."""
        return self.split.seconds(self.decisions)


def fit_budget(partitions: Iterable[Iterable[Split]], budget: int) -> Fit:
    """The fastest that fits; :class:`BudgetError` with the smallest budget for which something does.

    ``partitions``: the variants of each, from what saves most, and so computes least, to what saves least.
    """
    best: Fit | None = None
    smallest: Split | None = None
    for variants in partitions:
        over = False
        for split in variants:
            if smallest is None or split.taken + split.least < smallest.taken + smallest.least:
                smallest = split
            fit = split.fastest(budget)
            if fit is None:
                continue
            best = fit if best is None or fit.seconds < best.seconds else best
            compute = split.simulated(fit.decisions).compute_seconds
            over = best.seconds <= compute or (fit.unlimited and not split.offloaded)  # what saves less computes more
            if over or fit.unlimited:
                break
        if over:
            break
    if best is not None:
        return best
    assert smallest is not None
    raise BudgetError(budget, smallest.taken + smallest.least, smallest.seconds(smallest.decide(smallest.least)))


@dataclass(frozen=True)
class Trade:
    """A budget, and the fastest step that fits it."""

    bytes: int
    seconds: float
    arena: int
    recomputed: tuple[Recomputed, ...]
    offloaded: tuple[Offloaded, ...] = ()


def trades(partitions: Iterable[Iterable[Split]]) -> tuple[Trade, ...]:
    """Step time over budget: from the smallest that works, every budget from which on a step is faster."""
    found: list[Trade] = []
    for split in chain.from_iterable(partitions):
        for decisions in split.options():
            needs, arena = split.needs(decisions), decisions.memory.bytes
            found.append(Trade(needs, split.seconds(decisions), arena, split.recomputed, split.offloaded))
    faster: list[Trade] = []
    for trade in sorted(found, key=lambda each: (each.bytes, each.seconds)):
        if not faster or trade.seconds < faster[-1].seconds:
            faster.append(trade)
    return tuple(faster)
