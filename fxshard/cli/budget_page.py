"""``fxshard inspect --sweep --html``: step time over budget as a page that needs nothing else, a curve and a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from fxshard.schedule.html import duration
from fxshard.schedule.schedule import size

if TYPE_CHECKING:
    from fxshard.passes.budget_trades import Trade

WIDTH, HEIGHT, MARGIN = 900, 360, 70
TICKS = 5
STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;max-width:1100px}table{border-collapse:collapse}"
    "td,th{padding:.3em .8em;text-align:right;border-bottom:1px solid #ddd;vertical-align:top}"
    "td:last-child,th:last-child{text-align:left}text{font-size:12px;fill:#444}"
    ".axis{stroke:#999}.curve{fill:none;stroke:#2563eb;stroke-width:2}.point{fill:#2563eb}"
)


def to_html(trades: Sequence[Trade], shown: Sequence[Trade], heading: str, about: str, capacity: int) -> str:
    """``shown``: rows of the table. ``about``: the model, its layers and inputs. ``capacity``: bytes of the device."""
    rows = "".join(_row(trade) for trade in shown)
    titles = (
        "memory_budget",
        "simulated step",
        "arena",
        "optimizer state",
        "computed again in backward, or on the host",
    )
    head = "<tr>" + "".join(f"<th>{title}</th>" for title in titles) + "</tr>"
    said = (
        f"Each point is a budget from which on the simulated step is faster; the first is the smallest that works. "
        f"The device has {size(capacity)}."
    )
    return (
        f'<!doctype html><meta charset="utf-8"><title>{escape(heading)}</title><style>{STYLE}</style>'
        f"<h1>{escape(heading)}</h1><p>{escape(about)}</p><p>{said}</p>"
        f"{_curve(trades)}<table>{head}{rows}</table>\n"
    )


def _row(trade: Trade) -> str:
    again = [*(each.name for each in trade.recomputed), *(f"{each.name} (on the host)" for each in trade.offloaded)]
    cells = (size(trade.bytes), duration(trade.seconds), size(trade.arena), trade.state, ", ".join(again) or "nothing")
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _curve(trades: Sequence[Trade]) -> str:
    """A staircase: between two budgets a step is as fast as with the smaller one."""
    first, last, slowest = trades[0].bytes, trades[-1].bytes, max(trade.seconds for trade in trades)
    inner, height = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def x(budget: float) -> float:
        return MARGIN + inner * (budget - first) / max(last - first, 1)

    def y(seconds: float) -> float:
        return HEIGHT - MARGIN - height * seconds / slowest

    points = [(x(trades[0].bytes), y(trades[0].seconds))]
    for before, trade in pairwise(trades):
        points += [(x(trade.bytes), y(before.seconds)), (x(trade.bytes), y(trade.seconds))]
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dots = "".join(
        f'<circle class="point" cx="{x(t.bytes):.1f}" cy="{y(t.seconds):.1f}" r="3"><title>'
        f"{size(t.bytes)}: {duration(t.seconds)}</title></circle>"
        for t in trades
    )
    bottom, marks = HEIGHT - MARGIN, [i / (TICKS - 1) for i in range(TICKS)]
    axes = f'<path class="axis" fill="none" d="M{MARGIN},{MARGIN}V{bottom}H{WIDTH - MARGIN}"/>'
    axes += "".join(
        f'<text x="{MARGIN + inner * mark:.1f}" y="{bottom + 18}" text-anchor="middle">'
        f"{size(int(first + (last - first) * mark))}</text>"
        f'<text x="{MARGIN - 6}" y="{y(slowest * mark) + 4:.1f}" text-anchor="end">{duration(slowest * mark)}</text>'
        for mark in marks
    )
    names = f'<text x="{WIDTH / 2}" y="{HEIGHT - 20}" text-anchor="middle">memory_budget</text>'
    names += f'<text x="{MARGIN}" y="{MARGIN - 20}">simulated step</text>'
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="simulated step over memory_budget"'
    return f'<svg {box}>{axes}{names}<polyline class="curve" points="{line}"/>{dots}</svg>'
