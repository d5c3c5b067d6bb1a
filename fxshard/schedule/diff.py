"""The differences between two schedules."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fxshard.schedule.events import Event, Kind, Phase
from fxshard.schedule.schedule import Schedule, size

SHOWN = 8
"""Events listed per kind of change before the report says how many more there are."""

Key = tuple[Phase, Kind, str, int]


@dataclass(frozen=True)
class Change:
    """An event of two schedules: its position and itself in the first and in the second, where it is there."""

    was: int | None
    now: int | None
    before: Event | None
    after: Event | None

    def __str__(self) -> str:
        event = self.after or self.before
        assert event is not None
        at = f"#{self.was}" if self.was is not None else ""
        at += " → " * (self.was is not None and self.now is not None)
        at += f"#{self.now}" if self.now is not None else ""
        return f"{at:<14}{event.phase.value} {event.kind.value} {event.bucket}"


@dataclass(frozen=True)
class ScheduleDiff:
    """The changes from ``a`` to ``b``; false where the runtime events are the same. ``print`` it."""

    a: Schedule
    b: Schedule
    added: tuple[Change, ...]
    removed: tuple[Change, ...]
    moved: tuple[Change, ...]
    """In both, but at another place among the other events, or with other compute before it."""
    changed: tuple[Change, ...]
    """In both, but with other bytes, another dtype or another process group."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.moved or self.changed)

    @property
    def first(self) -> Change | None:
        """The earliest difference."""
        found = (*self.added, *self.removed, *self.moved, *self.changed)
        return min(found, key=_earliest, default=None)

    def __str__(self) -> str:
        a, b = self.a, self.b
        lines = [f"schedule {a.digest} → {b.digest}"]
        for name, before, after in (
            ("ZeRO stage", a.zero, b.zero),
            ("ranks", a.ranks, b.ranks),
            ("budget", _budget(a), _budget(b)),
        ):
            if before != after:
                lines.append(f"  {name:<15}{before} → {after}")
        for name, before, after in (
            ("peak", a.peak_bytes, b.peak_bytes),
            ("arena", a.arena_bytes, b.arena_bytes),
            ("communication", a.comm_bytes, b.comm_bytes),
        ):
            lines.append(f"  {name:<15}{_amount(before, after)}")
        counts = (("added", self.added), ("removed", self.removed), ("moved", self.moved), ("changed", self.changed))
        said = ", ".join(f"{len(changes)} {name}" for name, changes in counts if changes) or "the same"
        lines.append(f"  {'events':<15}{_runtime_events(a)} → {_runtime_events(b)}: {said}")
        if self.first is not None:
            lines.append(f"first difference: {' '.join(str(self.first).split())}{_reasons(self.first)}")
        for name, changes in counts:
            if changes:
                lines.append(f"{name}:")
                lines += [f"  {change}{_what(change) if name == 'changed' else ''}" for change in changes[:SHOWN]]
                if len(changes) > SHOWN:
                    lines.append(f"  … and {len(changes) - SHOWN} more")
        return "\n".join(lines)


def diff(a: Schedule, b: Schedule) -> ScheduleDiff:
    """Compare the runtime events of two schedules; stretches of compute only say where an event stands.

    >>> print(diff(plan(model, x, world_size=8), plan(model, x, world_size=8, memory_budget="40GiB")))
    """
    in_a, in_b = _keyed(a), _keyed(b)
    added = tuple(Change(None, j, None, b.events[j]) for key, j in in_b.items() if key not in in_a)
    removed = tuple(Change(i, None, a.events[i], None) for key, i in in_a.items() if key not in in_b)
    both = [Change(i, in_b[key], a.events[i], b.events[in_b[key]]) for key, i in in_a.items() if key in in_b]
    places = [(i, in_b[key]) for key, i in in_a.items() if key in in_b]
    stay = _longest_increasing([j for _, j in places])
    before_a, before_b, comparable = _compute_before(a), _compute_before(b), _same_compute(a, b)
    moved = tuple(
        change
        for k, (change, (i, j)) in enumerate(zip(both, places, strict=True))
        if k not in stay or (a.events[i].phase in comparable and before_a[i] != before_b[j])
    )
    changed = tuple(change for change in both if _payload(change.before) != _payload(change.after))
    return ScheduleDiff(a, b, added, removed, moved, changed)


def _keyed(schedule: Schedule) -> dict[Key, int]:
    """Position of each runtime event; the last part of the key tells apart events that happen several times."""
    seen: Counter[tuple[Phase, Kind, str]] = Counter()
    keyed: dict[Key, int] = {}
    for i, event in enumerate(schedule.events):
        if event.kind is not Kind.COMPUTE:
            what = (event.phase, event.kind, event.bucket)
            keyed[*what, seen[what]] = i
            seen[what] += 1
    return keyed


def _longest_increasing(values: Sequence[int]) -> set[int]:
    """Positions of a longest increasing subsequence: what can stay while the fewest others move."""
    tails: list[int] = []  # position of the smallest value that ends a subsequence of each length
    back: list[int | None] = []
    for i, value in enumerate(values):
        at = bisect_left(tails, value, key=values.__getitem__)
        back.append(tails[at - 1] if at else None)
        tails[at : at + 1] = [i]
    kept: set[int] = set()
    i_or_none = tails[-1] if tails else None
    while i_or_none is not None:
        kept.add(i_or_none)
        i_or_none = back[i_or_none]
    return kept


def _compute_before(schedule: Schedule) -> list[tuple[int, int]]:
    """(FLOP, traffic) of the compute that stands before each event in its phase: its place in the program."""
    done: dict[Phase, tuple[int, int]] = defaultdict(lambda: (0, 0))
    before = []
    for event in schedule.events:
        flops, traffic = done[event.phase]
        before.append((flops, traffic))
        if event.kind is Kind.COMPUTE:
            done[event.phase] = (flops + event.flops, traffic + event.traffic)
    return before


def _same_compute(a: Schedule, b: Schedule) -> set[Phase]:
    """Phases in which both compute the same, so that places in them can be compared."""

    def total(schedule: Schedule, phase: Phase) -> tuple[int, int]:
        compute = [event for _, event in schedule.of(Kind.COMPUTE, phase=phase)]
        return sum(event.flops for event in compute), sum(event.traffic for event in compute)

    return {phase for phase in Phase if total(a, phase) == total(b, phase)}


def _payload(event: Event | None) -> tuple[object, ...]:
    return (event.bytes, event.dtype, event.group, event.params) if event is not None else ()


def _earliest(change: Change) -> int:
    return min(at for at in (change.was, change.now) if at is not None)


def _reasons(change: Change) -> str:
    reasons = [event.why for event in (change.before, change.after) if event is not None]
    return f" ({' → '.join(dict.fromkeys(reasons))})"


def _what(change: Change) -> str:
    assert change.before is not None and change.after is not None
    a, b = change.before, change.after
    said = []
    if a.bytes != b.bytes:
        said.append(f"{size(a.bytes)} → {size(b.bytes)}")
    if a.dtype != b.dtype:
        said.append(f"{a.dtype} → {b.dtype}".replace("torch.", ""))
    if a.group != b.group:
        said.append(f"{a.group} → {b.group}")
    if a.params != b.params:
        said.append("other parameters")
    return ": " + ", ".join(said)


def _amount(before: int, after: int) -> str:
    if before == after:
        return f"{size(before)}, unchanged"
    sign = "+" if after > before else "−"
    share = f", {sign}{abs(after - before) / before:.1%}" if before else ""
    return f"{size(before)} → {size(after)} ({sign}{size(abs(after - before))}{share})"


def _budget(schedule: Schedule) -> str:
    return "none" if schedule.budget is None else size(schedule.budget)


def _runtime_events(schedule: Schedule) -> int:
    return sum(event.kind is not Kind.COMPUTE for event in schedule.events)
