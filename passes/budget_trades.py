"""Step, over all memory budgets: the fastest step that fits each; what ``fit_budget`` chooses from, as a curve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxshard.passes.fit_budget import Split
from fxshard.planner.kept_state import KeptState
from fxshard.planner.state import FORMATS
from fxshard.schedule.offloads import Offloaded, Recomputed

PARTS = 4
"""Into which the moments that may go to the host are cut."""


@dataclass(frozen=True)
class Trade:
    """A budget, and the fastest step that fits it."""

    bytes: int
    seconds: float
    arena: int
    recomputed: tuple[Recomputed, ...]
    offloaded: tuple[Offloaded, ...] = ()
    state: str = ""
    """How optimizer state is kept, in words."""


def trades(splits: Iterable[Split]) -> tuple[Trade, ...]:
    """Step time over budget: from the smallest that works, every budget from which on a step is faster, or as fast with
    optimizer state in more bits.

    Of the ways to keep optimizer state, some that are evenly far apart; a budget in between may have a faster step.
    """
    found: list[tuple[Trade, int]] = []
    for split in splits:
        ways = _some(split.ways())
        for each in (split, *map(split.offloading, split.on_host)):
            for arena in each.arenas:
                decisions, seconds = each.decide(arena), each.seconds(arena, ways[0])
                for kept in ways:
                    needs, about = each.needs(decisions, kept), seconds + kept.seconds - ways[0].seconds
                    if kept is ways[0] or not any(t.bytes <= needs and t.seconds <= about for t, _ in found):
                        step, size = each.simulated(decisions, kept).step_seconds, decisions.memory.bytes
                        trade = Trade(needs, step, size, each.recomputed, each.offloaded, str(kept))
                        found.append((trade, FORMATS.index(kept.format)))
    faster: list[tuple[Trade, int]] = []
    for trade, format in sorted(found, key=lambda each: (each[0].bytes, each[0].seconds, each[1])):
        if not faster or (trade.seconds, format) < (faster[-1][0].seconds, faster[-1][1]):
            faster.append((trade, format))
    return tuple(trade for trade, _ in faster)


def _some(ways: Sequence[KeptState]) -> list[KeptState]:
    """Those that take less of the device than all that are as fast, and of those with moments on the host a few."""
    less: list[KeptState] = []
    for kept in ways:
        if not less or kept.device_bytes < less[-1].device_bytes:
            less.append(kept)
    moving = [kept for kept in less if kept.on_host]
    apart = max(len(moving) // PARTS, 1)
    return [kept for kept in less if not kept.on_host] + moving[::-1][::apart][::-1]
