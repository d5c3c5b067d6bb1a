"""Step, under a memory budget: what backward computes again, what is on the host, what the arena may take, and how
optimizer state is kept, so that all of it fits.

Requires graphs that can be split again with less saved (``Partitioned.tighter``). The splits are tried from the one
that saves most, each as it is and with saved values on the host; for each, arenas of several sizes. Which there are
does not depend on the budget, and of those that fit, the one with the shortest simulated step is taken: more memory
never makes a slower step. What backward computes again, or copies, makes no arena faster, launches aside: so an arena
is tried no more once a split that saves all of it takes longer there than the best step that was found, and by more
than all its launches. Optimizer state that is left to the planner is kept, for each split and arena, in the way that
makes updates least longer among those that fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from fxshard._torch import private
from fxshard._torch.errors import BudgetError
from fxshard.passes.context import PassContext
from fxshard.passes.decide import Decisions, decide, least_arena, plain_orders
from fxshard.passes.draft import Draft
from fxshard.passes.fill_arena import leading_bytes
from fxshard.passes.keep_resident import Order
from fxshard.passes.offload_saved import SavedKind, offload_saved, saved_kinds
from fxshard.planner.hardware import Hardware, hardware
from fxshard.planner.kept_state import KeptState, ways_to_keep
from fxshard.planner.state import AUTO
from fxshard.schedule.events import Kind, Phase
from fxshard.schedule.offloads import Offloaded, Recomputed
from fxshard.schedule.record import resident_bytes
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.simulate import Simulation, event_seconds, simulate

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
    outputs: int | None = None
    """Results of forward that are not saved; None: nothing is."""
    symbolic: bool = False
    """Whether sizes are open."""
    recomputed: tuple[Recomputed, ...] = ()
    offloaded: tuple[Offloaded, ...] = ()
    decided: dict[Any, Decisions] = field(default_factory=dict, compare=False, repr=False)
    """Decisions that were made, by what they depend on: several budgets ask for the same."""
    simulations: dict[Any, Simulation] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        graphs: Graphs,
        context: PassContext,
        carries: bool,
        outputs: int | None,
        recomputed: tuple[Recomputed, ...] = (),
    ) -> Split:
        values = [node.meta.get("val") for each in graphs.values() for node in each.graph.find_nodes(op="placeholder")]
        symbolic = any(map(private.free_symbols, values))
        draft = Draft.of(graphs, context.options.fused)
        return cls(graphs, draft, context, carries, outputs, symbolic, recomputed)

    @property
    def machine(self) -> Hardware:
        return self.context.hardware or hardware("h200")

    @cached_property
    def kinds(self) -> list[SavedKind]:
        """Saved values that may be on the host. Not those whose sizes are open: places on the host have a size."""
        asked = self.context.options.activations
        own_memory = self.machine.host_bandwidth > 0
        if asked == "recompute" or not (own_memory or asked == "offload") or len(self.graphs) < 2:
            return []
        return saved_kinds(self.graphs, self.outputs, self.machine) if self.outputs is not None else []

    @property
    def on_host(self) -> list[int]:
        """How many kinds to try on the host.

        Where everything is saved, one more each time; where backward computes things again already, as many as forward
        hides, and all.
        """
        if not self.recomputed:
            return list(range(1, len(self.kinds) + 1))
        copying = accumulate(kind.offloaded.seconds for kind in self.kinds)
        return sorted({sum(seconds <= self.computing[Phase.FORWARD] for seconds in copying), len(self.kinds)} - {0})

    @cached_property
    def computing(self) -> dict[Phase, float]:
        """Seconds that forward and backward compute."""
        schedule, found = self.scheduled(self.decide(self.least), self.ways()[0]), dict.fromkeys(self.graphs, 0.0)
        for event, seconds in zip(schedule.events, event_seconds(schedule, self.machine), strict=True):
            if event.kind is Kind.COMPUTE and event.phase in found:
                found[event.phase] += seconds
        return found

    def outlasting(self, count: int) -> float:
        """Seconds by which copies of so many kinds take longer than what is computed meanwhile: forward ends when they
        have left, and they come back while backward runs."""
        copying = sum(kind.offloaded.seconds for kind in self.kinds[:count])
        return sum(max(0.0, copying - seconds) for seconds in self.computing.values())

    def freed(self, count: int) -> int:
        """Bytes of so many kinds: with them on the host, a rank holds at most so much less."""
        return sum(kind.offloaded.bytes for kind in self.kinds[:count])

    def offloading(self, count: int) -> Split:
        """The same with so many kinds on the host."""
        offloaded = tuple(kind.offloaded for kind in self.kinds[:count])
        made = Split.of(offload_saved(self.graphs, self.kinds[:count]), self.context, self.carries, None)
        return replace(made, recomputed=self.recomputed, offloaded=offloaded)

    @cached_property
    def launches(self) -> float:
        """Seconds that launches take. They are counted once for each stretch of compute, and a split that saves less
        may be cut into fewer: only by so much can it be faster."""
        return sum(map(len, self.draft.stretches.values())) * self.machine.launch_overhead

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        return plain_orders(self.draft.timeline, replace(self.context, observer=None))

    @cached_property
    def least(self) -> int:
        """The smallest arena, in bytes."""
        return least_arena(self.orders)

    def ways(self) -> tuple[KeptState, ...]:
        """How optimizer state may be kept, the fastest first."""
        return ways_to_keep(self.context.buckets, self.context.state, self.machine)

    @cached_property
    def at_rest(self) -> int:
        """What a rank holds all the time, without the optimizer's moments."""
        buckets = self.context.buckets
        return resident_bytes(buckets) - KeptState(buckets).device_bytes

    def taken(self, kept: KeptState) -> int:
        """What a rank holds besides the arena. Where an update brings moments from the host, activations are gone."""
        return self.at_rest + kept.device_bytes + max(self.draft.activations, kept.staging_bytes)

    def smallest(self, ways: Sequence[KeptState]) -> KeptState:
        """The way to keep optimizer state with which a rank holds least."""
        return min(ways, key=self.taken)

    @cached_property
    def arenas(self) -> tuple[int | None, ...]:
        """Sizes to try, from the smallest to one in which everything has a place; None: without a budget's rules.

        Where sizes are open, ranks may have other ones, and must gather the same: no more than without a budget.
        """
        most = 2 * sum(bucket.gathered_bytes + bucket.grad_bytes for bucket in self.context.buckets)
        more = max((bucket.gathered_bytes for bucket in self.context.buckets), default=0)
        found = [self.least]
        while 0 < more < most and not self.symbolic:
            found.append(self.least + more)
            more *= GROWTH
        return (*found, None) if self.symbolic else (*found, self.least + most, None)

    def decide(self, arena: int | None) -> Decisions:
        key = arena, self.context.options.debug, self.context.hardware
        if key not in self.decided:
            made = decide(self.orders, arena)
            self.decided[key] = next((each for each in self.decided.values() if each == made), made)
        return self.decided[key]

    def needs(self, decisions: Decisions, kept: KeptState) -> int:
        """What a rank may hold. Gathers that an optimizer step starts may have to be moved out of the arena."""
        memory = decisions.memory
        return self.taken(kept) + memory.bytes + leading_bytes(decisions.timeline, memory.leading)

    def scheduled(self, decisions: Decisions, kept: KeptState) -> Schedule:
        """What the graphs will do, once they are what was decided."""
        made = self.draft.decided(decisions, replace(self.context, buckets=kept.buckets), self.carries)
        return replace(made, recomputed=self.recomputed, offloaded=self.offloaded)

    def simulated(self, decisions: Decisions, kept: KeptState) -> Simulation:
        # By the cost model alone: recorded durations differ between ranks, and what is gathered must not.
        key = id(decisions), self.machine, self.carries, kept.key  # which are kept
        if key not in self.simulations:
            self.simulations[key] = simulate(self.scheduled(decisions, kept), self.machine)
        return self.simulations[key]

    def seconds(self, arena: int | None, kept: KeptState) -> float:
        """Of the simulated step, if the arena may take so much."""
        return self.simulated(self.decide(arena), kept).step_seconds


@dataclass(frozen=True)
class Fit:
    """What was chosen: a split, the order of its events within an arena, how optimizer state is kept, and the step."""

    split: Split
    decisions: Decisions
    kept: KeptState
    seconds: float
    """Of the simulated step."""


def fit_budget(splits: Iterable[Split], budget: int) -> Fit:
    """The fastest that fits; :class:`BudgetError` with the smallest budget for which something does.

    ``splits``: from what saves most, and so computes least, to what saves least.
    """
    search: _Search | None = None
    left_out: list[tuple[Split, int]] = []
    for split in splits:
        search = search or _Search(budget, _allowed(split, budget))
        done = search.consider(split)
        search.bound = split
        for count in split.on_host if not search.is_over() else ():
            if search.copies_too_much(split, count) or len(done) == len(split.arenas):
                break  # what has more on the host only copies more
            if search.frees_too_little(split, count, done):
                left_out.append((split, count))
            else:
                done |= search.consider(split.offloading(count), done)
        if search.is_over():
            break
    assert search is not None
    if search.best is not None:
        return search.best
    for split, count in left_out:
        search.consider(split.offloading(count))
    assert search.smallest is not None
    least, smallest, kept = search.smallest
    raise BudgetError(budget, least, smallest.seconds(smallest.least, kept), _with_other_state(smallest, least))


def _allowed(split: Split, budget: int) -> tuple[KeptState, ...]:
    """The ways to keep optimizer state that are tried.

    An evaluation updates nothing, so that moving moments seems to cost nothing: it moves no more than it has to.
    """
    ways = split.ways()
    if Phase.BACKWARD in split.graphs:
        return ways
    enough = next((kept for kept in ways if split.taken(kept) + split.least <= budget), None)
    return ways if enough is None else (enough,)


def _with_other_state(split: Split, smallest: int) -> dict[str, int]:
    """What a split would need with optimizer state in 8 bits or on the host, where that is less, by what to write.

    Layouts, and so arena and activations, are the same however state is kept. What is left to the planner was tried.
    """
    buckets, asked = split.context.buckets, split.context.state
    trained = [bucket for bucket in buckets if bucket.trainable]
    if not trained or any(bucket.master_dtype != torch.float32 for bucket in trained):
        return {}
    muon, rows = (any(getattr(bucket, field) for bucket in trained) for field in ("matrices", "row_moments"))
    name = "NorMuon" if rows else "Muon" if muon else "AdamW"
    choices = [replace(asked, format="8bit")] if asked.format != AUTO else []
    if split.machine.host_bandwidth > 0 and asked.offload != AUTO:
        choices.append(replace(asked, offload="host"))
    found: dict[str, int] = {}
    for choice in choices:
        least = split.taken(split.smallest(ways_to_keep(buckets, choice, split.machine))) + split.least
        if least < smallest:
            said = [f'{key}="{value}"' for key, value in (("state", choice.format), ("offload", choice.offload))]
            said = [each for each in said if each not in ('state="fp32"', 'offload="none"')]
            found[f"fxshard.{name}({', '.join(said)})"] = least
    return found


@dataclass
class _Search:
    """The best so far, and what can still be better."""

    budget: int
    ways: tuple[KeptState, ...]
    """How optimizer state may be kept, the fastest first."""
    best: Fit | None = None
    bound: Split | None = None
    """The last split without anything on the host: in the same arena, what comes after it is not faster."""
    smallest: tuple[int, Split, KeptState] | None = None
    """The least that something needs, and what that is."""

    def consider(self, split: Split, done: Set[int] = frozenset()) -> set[int]:
        """Try the arenas in which a split may be better. Those, by number, in which no split that only copies more can
        be: where it fits with state in the fastest way, or is too slow. ``done``: where this is known."""
        kept = split.smallest(self.ways)
        least = split.taken(kept) + split.least
        if self.smallest is None or least < self.smallest[0]:
            self.smallest = least, split, kept
        if least > self.budget:
            return set()
        found: set[int] = set()
        for i, arena in enumerate(split.arenas):
            if i in done or not self._may_be_faster(i):
                found.add(i)
                continue
            decisions = split.decide(arena)
            fitting = next((way for way in self.ways if split.needs(decisions, way) <= self.budget), None)
            if fitting is self.ways[0]:
                found.add(i)
            if fitting is None or not self._may_update(fitting):
                continue
            if self.best is None or split.seconds(arena, fitting) < self.best.seconds:
                self.best = Fit(split, decisions, fitting, split.seconds(arena, fitting))
        return found

    def is_over(self) -> bool:
        """Whether nothing that computes as much as the last split, or more, can be faster."""
        if self.best is None or self.bound is None:
            return False
        if self.bound.symbolic or self.best.seconds <= self._computes():
            return True
        return not any(map(self._may_be_faster, range(len(self.bound.arenas))))

    def copies_too_much(self, split: Split, count: int) -> bool:
        """Whether a split cannot be better with so many kinds on the host, because copies take too long."""
        return self.best is not None and self._computes() + split.outlasting(count) >= self.best.seconds

    def frees_too_little(self, split: Split, count: int, done: Set[int]) -> bool:
        """Whether a split cannot be better with so many kinds on the host, because it would still not fit."""
        kept, freed = split.smallest(self.ways), split.freed(count)
        if self.best is None:
            return split.taken(kept) + split.least - freed > self.budget
        faster = [arena for i, arena in enumerate(split.arenas) if i not in done and self._may_be_faster(i)]
        return all(split.needs(split.decide(arena), kept) - freed > self.budget for arena in faster)

    def _may_be_faster(self, i: int) -> bool:
        """Whether a split may be faster than the best in an arena of the size number ``i``."""
        if self.best is None or self.bound is None:
            return True
        bound = self.bound.seconds(self.bound.arenas[i], self.ways[0])
        return bound - self.bound.launches < self.best.seconds

    def _may_update(self, kept: KeptState) -> bool:
        """Whether a split may be faster than the best with updates that take so much longer."""
        if self.best is None or self.bound is None:
            return True
        return self._computes() + kept.seconds - self.ways[0].seconds < self.best.seconds

    def _computes(self) -> float:
        """The least time in which compute and updates of a split run."""
        assert self.bound is not None
        run = self.bound.simulated(self.bound.decide(self.bound.least), self.ways[0])
        return run.compute_seconds - self.bound.launches
