"""What ``fxshard inspect`` says of memory budgets: step time over budget, and what one budget decided."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxshard.passes.fit_budget import Trade
    from fxshard.schedule.schedule import Schedule


def curve(trades: Sequence[Trade], arguments: argparse.Namespace) -> str:
    """Step time over budget, a line for each budget from which on a step is faster."""
    from fxshard.schedule.html import duration
    from fxshard.schedule.schedule import size

    slowest = max(trade.seconds for trade in trades)
    lines = [f"simulated step on {arguments.world_size} × {arguments.hardware}, by memory_budget", ""]
    lines.append(f"{'budget':>12}{'step':>12}{'arena':>12}   {'':<30} computed again in backward, or on the host")
    for trade in trades:
        bar = "█" * round(30 * trade.seconds / slowest)
        again = ", ".join(each.name for each in trade.recomputed)
        if trade.offloaded:
            again += "; " * bool(again) + "on the host: " + ", ".join(each.name for each in trade.offloaded)
        again = again or "nothing"
        lines.append(f"{size(trade.bytes):>12}{duration(trade.seconds):>12}{size(trade.arena):>12}   {bar:<30} {again}")
    return "\n".join(lines)


def decided(schedule: Schedule) -> str:
    """What a budget made of saved values, and why."""
    from fxshard.schedule.html import duration
    from fxshard.schedule.schedule import size

    kept = sum(event.why.startswith("kept since forward") for event in schedule.events)
    lines = [f"within the budget, {kept} buckets stay gathered from forward to backward, and backward computes again:"]
    for each in schedule.recomputed:
        traced = f"{each.count} values in the layers that were traced"
        lines.append(f"  {each.name}: {traced}, {size(each.bytes)} not saved for {duration(each.seconds)} of compute")
    if not schedule.recomputed:
        lines.append("  nothing" if schedule.offloaded else "  nothing: what is saved fits")
    lines += ["on the host from forward to backward:"] if schedule.offloaded else []
    for out in schedule.offloaded:
        lines.append(f"  {out.name}: {out.count} values, {size(out.bytes)}, copied in {duration(out.seconds)} each way")
    return "\n".join(lines)
