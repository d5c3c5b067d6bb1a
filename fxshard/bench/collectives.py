"""The collectives of a trace one by one, and the time in which the device was not this rank's.

python -m fxshard.bench.collectives traces/1b/fxshard-rank0.json.gz

Ranks that share a GPU take turns on it. In a trace of one of them the other's turn is a silence: no kernel begins or
ends, and whatever was running seems to take milliseconds longer than usual. A collective that waits for the other rank
lasts until that one has had its turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fxshard.bench.harness import Column, Row, Table
from fxshard.bench.trace import CALLS, Event, Recorded, enclosing, is_communication, length, overlap, read, span, union

EVENTS = ("fxshard ", "FSDP::", "Optimizer.")
"""Beginnings of the annotations that say what a launch belongs to."""

TURN_MS = 1.5
"""A silence that is this much longer than the kernels in it usually take is another process's turn. Turns were 2.4 ms
or more on an H200."""


COLUMNS = (
    Column("launched_ms", "launched ms", ".2f"),
    Column("begin_ms", "begins ms", ".2f"),
    Column("ms", "takes ms", ".2f"),
    Column("bare_ms", "bare ms", ".2f"),
    Column("blocks", "blocks", ".0f"),
)
"""Times count from the first kernel of the trace; *launched*: by the host. *bare*: without a kernel that computes at
the same time. *blocks* of threads: how many multiprocessors it occupies."""


@dataclass(frozen=True)
class Silence:
    """Nothing begins or ends on the device."""

    begin_ms: float
    end_ms: float
    under: str
    """What runs meanwhile: compute, communication (alone), or nothing."""
    away_ms: float
    """Its length, less what the kernel that computes usually takes."""


@dataclass(frozen=True)
class Turns:
    """How a device is shared."""

    silences: tuple[Silence, ...]
    period_ms: float
    """From the end of one silence to the end of the next, the median."""
    turn_ms: float
    """The other's turn: the median of silences under compute."""

    def total(self, under: str) -> float:
        return sum(silence.end_ms - silence.begin_ms for silence in self.silences if silence.under == under)

    @property
    def spinning_ms(self) -> float:
        """This rank's own time in which it only waits for the other: what silences under communication last longer."""
        alone = (silence for silence in self.silences if silence.under == "communication")
        return sum(max(0.0, silence.end_ms - silence.begin_ms - self.turn_ms) for silence in alone)


def collectives(events: Iterable[Event]) -> list[Row]:
    """NCCL's kernels in the order in which they begin, named by their events, with the kind as torch calls it and the
    elements that this rank gives."""
    recorded = Recorded.of(events)
    complete, ran = recorded.complete, recorded.ran
    first = min((e["ts"] for e in ran), default=0.0)
    calls = {e["args"].get("correlation"): e for e in complete if e.get("cat") in CALLS}
    named = [e for e in complete if e.get("cat") == "user_annotation" and e["name"].startswith(EVENTS)]
    compute = union(span(e) for e in ran if e["cat"] == "kernel" and not is_communication(e["name"]))
    found = []
    for e in sorted(filter(_communicates, ran), key=lambda e: e["ts"]):
        args, call = e["args"], calls.get(e["args"].get("correlation"))
        found.append(
            {
                "name": next(iter(enclosing(call, named)), "?") if call is not None else "?",
                "kind": args.get("Collective name", "?"),
                "launched_ms": (call["ts"] - first) / 1e3 if call is not None else None,
                "begin_ms": (e["ts"] - first) / 1e3,
                "ms": e["dur"] / 1e3,
                "bare_ms": (e["dur"] - length(overlap([span(e)], compute))) / 1e3,
                "sent": args.get("In msg nelems", 0),
                "blocks": args.get("grid", [0])[0],
            }
        )
    return found


def turns(events: Iterable[Event]) -> Turns | None:
    """The other ranks' turns on the device; None if there were none."""
    ran = Recorded.of(events).ran
    first = min((e["ts"] for e in ran), default=0.0)
    usual = _usual(ran)
    ends = sorted(time for e in ran for time in span(e))
    silences = []
    for begin, end in pairwise(ends):
        if end - begin < TURN_MS * 1e3:
            continue
        running = [e for e in ran if e["ts"] <= begin and e["ts"] + e["dur"] >= end]
        computing = [usual[_kind(e)] for e in running if not _communicates(e)]
        away = (end - begin - max(computing, default=0.0)) / 1e3
        if away >= TURN_MS:
            under = "compute" if computing else "communication" if running else "nothing"
            silences.append(Silence((begin - first) / 1e3, (end - first) / 1e3, under, away))
    if len(silences) < 2:
        return None
    period = statistics.median(after.end_ms - before.end_ms for before, after in pairwise(silences))
    computed = [silence.away_ms for silence in silences if silence.under == "compute"]
    turn = statistics.median(computed or [silence.away_ms for silence in silences])
    return Turns(tuple(silences), period, turn)


def _communicates(event: Event) -> bool:
    return event["cat"] == "kernel" and is_communication(event["name"])


def _kind(event: Event) -> tuple[str, str]:
    return event["name"], str(event["args"].get("grid"))


def _usual(ran: Iterable[Event]) -> dict[tuple[str, str], float]:
    """The least time of each kind of kernel: those that were interrupted take longer."""
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in ran:
        taken[_kind(event)].append(event["dur"])
    return {kind: min(times) for kind, times in taken.items()}


def report(found: Sequence[Row], shared: Turns | None) -> str:
    lines = [str(Table("", COLUMNS, found))]
    alike: dict[tuple[str, int], list[float]] = defaultdict(list)
    for each in found:
        alike[each["kind"], each["sent"]].append(each["ms"])
    lines.append("\nby size:")
    for (kind, sent), took in alike.items():
        fast = sum(ms < TURN_MS for ms in took)
        size = f"{sent / 1e6:.1f} M elements"
        lines.append(f"  {len(took):>3} {kind} of {size}: {min(took):.2f} to {max(took):.2f} ms, {fast} in < {TURN_MS}")
    if shared is None:
        return "\n".join([*lines, "\nthe device was this rank's all the time"])
    count, turn, period = len(shared.silences), shared.turn_ms, shared.period_ms
    lines.append(f"\nanother process's turns: {count}, {turn:.2f} ms each, one every {period:.2f} ms (medians)")
    for under in ("compute", "communication", "nothing"):
        lines.append(f"  under {under}: {shared.total(under):.1f} ms in all")
    lines.append(f"this rank's own time, spent waiting in collectives: {shared.spinning_ms:.1f} ms")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("trace", type=Path, help="a Chrome trace of one rank, as --trace writes it")
    events = read(parser.parse_args().trace)
    print(report(collectives(events), turns(events)))


if __name__ == "__main__":
    main()
