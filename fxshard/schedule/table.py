"""A schedule as a table: one row per event, repeated layers folded into one."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fxshard.schedule.events import OF_HOST, Event, Kind
from fxshard.schedule.schedule import COMMUNICATES, Schedule, size

WIDEST = 140
WIDE = 100
LONGEST_PERIOD = 64
"""Events per layer beyond which repetition is not looked for."""
LAST_USE = "last use: "
"""In front of the name of a node; what else has a reason names parameters."""
LEAST_REPEATS = 3

SIZED = (*COMMUNICATES, Kind.ACCUMULATE, Kind.UPDATE, Kind.OFFLOAD, Kind.RELOAD)
"""Events whose bytes are shown."""

STYLES = {
    Kind.UNSHARD: "cyan",
    Kind.REDUCE: "magenta",
    Kind.ALL_REDUCE: "magenta",
    Kind.UPDATE: "green",
    Kind.EXCHANGE: "yellow",
    Kind.SCALES: "yellow",
    Kind.COLLECTIVE: "blue",
    Kind.OFFLOAD: "green",
    Kind.RELOAD: "green",
    Kind.COMPUTE: "dim",
}


def render(schedule: Schedule, width: int | None = None, *, colour: bool = False) -> str:
    """The schedule as text, at most 140 columns wide; plain unless ``colour``.

    >>> print(render(model.schedule, width=100))
    """
    text = io.StringIO()
    terminal = shutil.get_terminal_size((WIDEST, 0)).columns if sys.stdout.isatty() else WIDEST
    columns = min(width or terminal, WIDEST)
    console = Console(file=text, width=columns, force_terminal=colour, color_system="standard" if colour else None)
    console.print(table(schedule, columns))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def table(schedule: Schedule, width: int = WIDEST) -> Group:
    """The table of :func:`render`, for a ``rich`` console of your own. A narrow one leaves out dtype and arena."""
    wide = width >= WIDE
    folds = list(folded(_rows(schedule)))
    labels = [
        between(*(fold.rows[k].label for k in (j, j - fold.period))) for fold in folds for j in range(fold.period)
    ]
    longest = max(map(len, labels), default=0)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    grid.add_column("#", justify="right", no_wrap=True)
    for name in ("phase", "", "event"):
        grid.add_column(name, no_wrap=True)
    grid.add_column("bucket", overflow="fold", min_width=min(longest, 30), max_width=44)
    grid.add_column("size", justify="right", no_wrap=True)
    if wide:
        grid.add_column("dtype", no_wrap=True)
        grid.add_column("arena at", no_wrap=True)
    grid.add_column("why", overflow="fold" if wide else "ellipsis", no_wrap=not wide)
    shown = ""
    for fold in folds:
        for j in range(fold.period):
            rows = fold.rows[j :: fold.period]
            first, last = rows[0], rows[-1]
            event = first.event
            phase, shown = ("" if event.phase == shown else event.phase.value), event.phase.value
            if phase and grid.row_count:
                grid.add_section()
            grid.add_row(
                str(first.position),
                Text(phase, style="bold"),
                Text(_brace(fold, j), style="yellow"),
                event.kind.value,
                Text(between(first.label, last.label)),
                first.amount,
                *((first.dtype, _places(rows)) if wide else ()),
                Text(first.event.why if event.kind is Kind.COMPUTE else between(first.event.why, last.event.why)),
                style=STYLES.get(event.kind, ""),
            )
    return Group(_title(schedule), Text(), grid)


def _title(schedule: Schedule) -> Text:
    ranks = f"{schedule.ranks} rank" + "s" * (schedule.ranks != 1) + schedule.replicated
    budget = f" of {size(schedule.budget)} budget" if schedule.budget is not None else ""
    held = f"{size(schedule.resident_bytes)} resident + {size(schedule.arena_bytes)} arena"
    held += f" + {size(schedule.activation_bytes + schedule.workspace_bytes)} activations"
    held += f", {size(schedule.host_bytes)} on the host" if schedule.host_bytes else ""
    moved = f"communication {size(schedule.comm_bytes)} per step" if schedule.comm_bytes else "no communication"
    return Text.assemble(
        (f"ZeRO-{schedule.zero} on {ranks}", "bold"),
        f" · {len(schedule.buckets)} buckets · {len(schedule.events)} events · digest {schedule.digest}\n",
        f"peak {size(schedule.peak_bytes)}{budget} ({held}) · {moved}\n",
        f"activations up to {size(schedule.activation_bytes)}",
        f", {size(schedule.saved_bytes)} saved for backward" if schedule.saved_bytes else "",
        f"\ncomputed again in backward: {', '.join(each.name for each in schedule.recomputed)}"
        if schedule.recomputed
        else "",
        f"\non the host from forward to backward: {', '.join(each.name for each in schedule.offloaded)}"
        if schedule.offloaded
        else "",
    )


@dataclass(frozen=True)
class Row:
    """One event as the table shows it. ``key`` is equal for the same event of two layers, up to their numbers."""

    position: int
    event: Event
    label: str
    amount: str
    dtype: str
    key: tuple[object, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Fold:
    """``len(rows) / period`` repetitions of a stretch of ``period`` rows, each one layer further than the last."""

    rows: Sequence[Row]
    period: int

    @property
    def repeats(self) -> int:
        return len(self.rows) // self.period


def folded(rows: Sequence[Row]) -> Iterator[Fold]:
    """Cut the rows into stretches that repeat for consecutive layers, and single rows between them."""
    at = 0
    while at < len(rows):
        covered, period = 1, 1
        for candidate in range(1, min(LONGEST_PERIOD, (len(rows) - at) // 2) + 1):
            repeats = _repeats(rows, at, candidate)
            if repeats >= LEAST_REPEATS and repeats * candidate > covered:
                covered, period = repeats * candidate, candidate
        yield Fold(rows[at : at + covered], period)
        at += covered


def _repeats(rows: Sequence[Row], at: int, period: int) -> int:
    """How often the ``period`` rows from ``at`` on stand there, the layer numbers in steps of one, up or down."""
    step, i = 0, at
    while i + period < len(rows):
        here, there = rows[i], rows[i + period]
        if here.key != there.key:
            break
        changes = {b - a for a, b in zip(here.numbers, there.numbers, strict=True)} - {0}
        if len(changes) > 1 or (here.numbers and not changes):
            break
        if changes:
            change = changes.pop()
            if abs(change) != 1 or (step and change != step):
                break
            step = change
        i += 1
    return (i - at) // period + 1 if step else 1


def _rows(schedule: Schedule) -> list[Row]:
    rows: list[Row] = []
    for i, event in enumerate(schedule.events):
        if event.kind is Kind.COMPUTE:
            if not event.flops and not event.traffic:
                continue
            label = schedule.touched(event)
            amount = flop(event.flops) if event.flops else f"{size(event.traffic)} r/w"
            key: tuple[object, ...] = (event.phase, event.kind, amount, _pattern(label))
            dtype = ""
        else:
            label = f"{event.op} in {event.group}" if event.op else event.bucket or schedule.touched(event)
            label = event.op if event.kind in OF_HOST else label
            amount = size(event.bytes) if event.kind in SIZED else ""
            dtype = str(event.dtype).removeprefix("torch.") if amount else ""
            why = re.sub(rf"^({LAST_USE}.*)_\d+$", r"\1", event.why)  # the first node of a name has no number
            key = (event.phase, event.kind, event.bytes, event.dtype, _pattern(label), _pattern(why))
        numbers = tuple(int(digits) for digits in re.findall(r"\d+", label))
        rows.append(Row(i, event, label, amount, dtype, key, numbers))
    return rows


def _pattern(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def between(first: str, last: str) -> str:
    """Two texts that differ in numbers as one.

    >>> between("layers.3.mlp", "layers.12.mlp")
    'layers.3…12.mlp'
    >>> between("last use: mm", "last use: mm_12")
    'last use: mm…12'
    """
    if first.startswith(LAST_USE) and re.fullmatch(r"_\d+", last.removeprefix(first)):
        return f"{first}…{last.removeprefix(first)[1:]}"
    if first.startswith(LAST_USE) and re.fullmatch(r"_\d+", first.removeprefix(last)):
        return f"{first}…0"
    a, b = re.split(r"(\d+)", first), re.split(r"(\d+)", last)
    if a[::2] != b[::2]:
        return first
    return "".join(x if x == y else f"{x}…{y}" for x, y in zip(a, b, strict=True))


def _brace(fold: Fold, j: int) -> str:
    if fold.repeats == 1:
        return ""
    if j == 0:
        return f"┌ ×{fold.repeats}" if fold.period > 1 else f"  ×{fold.repeats}"
    return "└" if j == fold.period - 1 else "│"


def _places(rows: Sequence[Row]) -> str:
    """Where in the arena the events take memory; two or three layers' worth of places take turns."""
    takes = (Kind.UNSHARD, Kind.GRAD)
    offsets = sorted({row.event.slot.offset for row in rows if row.event.slot is not None and row.event.kind in takes})
    if len(offsets) > 2:
        return f"{len(offsets)} places"
    return ", ".join(size(offset) for offset in offsets)


def flop(count: float) -> str:
    """Floating-point operations as a person reads them."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "FLOP" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TFLOP"
