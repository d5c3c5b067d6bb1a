"""Memory budgets in ``fxshard inspect``: step time over budget, and the decisions of one budget."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxshard.passes.budget_trades import Trade
    from fxshard.planner.hardware import Hardware
    from fxshard.schedule.schedule import Schedule


VISIBLE = 0.995


def curve(trades: Sequence[Trade], arguments: argparse.Namespace, about: str) -> str:
    """Step time over budget, a line for each budget from which on a step is faster by half a percent.

    ``about``: the model, its layers and inputs.
    """
    from fxshard.schedule.html import duration
    from fxshard.schedule.schedule import size

    slowest = max(trade.seconds for trade in trades)
    lines = [about, heading(arguments), ""]
    title = "optimizer state; computed again in backward, or on the host"
    lines.append(f"{'budget':>12}{'step':>12}{'arena':>12}   {'':<30} {title}")
    for trade in visibly_faster(trades):
        bar = "█" * round(30 * trade.seconds / slowest)
        again = ", ".join(each.name for each in trade.recomputed)
        if trade.offloaded:
            again += "; " * bool(again) + "on the host: " + ", ".join(each.name for each in trade.offloaded)
        again = f"{trade.state}; {again or 'nothing'}"
        lines.append(f"{size(trade.bytes):>12}{duration(trade.seconds):>12}{size(trade.arena):>12}   {bar:<30} {again}")
    return "\n".join(lines)


def heading(arguments: argparse.Namespace) -> str:
    """The title of the curve."""
    return f"simulated step on {arguments.world_size} × {arguments.hardware}, by memory_budget"


def visibly_faster(trades: Sequence[Trade]) -> Iterator[Trade]:
    """The budgets to show: those visibly faster than the one before, the last, and those that change the format."""
    shown: Trade | None = None
    for trade in trades:
        formats = {each.state.partition(" ")[0] for each in (trade, shown) if each is not None}
        if shown is None or trade is trades[-1] or trade.seconds < VISIBLE * shown.seconds or len(formats) > 1:
            shown = trade
            yield trade


def decisions(schedule: Schedule, hardware: Hardware) -> str:
    """What a budget decided about saved values and optimizer state, and why."""
    from fxshard.frontend.state_decision import state_line
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
    lines.append(state_line(schedule.buckets, hardware))
    return "\n".join(lines)
