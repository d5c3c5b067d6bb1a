"""Bars as an SVG file, written by hand: figures of a benchmark at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LABELS, BAR, GAP, MARGIN = 720, 190, 22, 8, 24
LONGEST = WIDTH - LABELS - MARGIN - 150
"""Pixels of the longest bar; what is written after it needs the rest."""

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .note { fill: #656d76 } .title { font-weight: 600 }
.peer { fill: #b8c0cc } .ours { fill: #2f6feb } .back { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #9198a1 } .peer { fill: #4d5560 } .ours { fill: #4c8dff } .back { fill: #0d1117 }
}
"""


@dataclass(frozen=True)
class Chart:
    """One group of bars. ``base`` is the bar that ratios are taken to; None: no ratios."""

    title: str
    unit: str
    bars: tuple[tuple[str, float], ...]
    base: str | None = None

    def ratio(self, value: float) -> float | None:
        reference = dict(self.bars).get(self.base) if self.base is not None else None
        return value / reference if reference else None


def to_svg(charts: Sequence[Chart], heading: str) -> str:
    """The charts below each other. What is fxshard's is coloured; shorter bars are better in all of them."""
    body: list[str] = []
    y = MARGIN + 14
    body.append(f'<text class="title" x="{MARGIN}" y="{y}">{escape(heading)}</text>')
    for chart in charts:
        y += 34
        body.append(f'<text class="note" x="{MARGIN}" y="{y}">{escape(chart.title)}, {escape(chart.unit)}</text>')
        y += 12
        longest = max(value for _, value in chart.bars) or 1.0
        for name, value in chart.bars:
            body += _bar(name, value, chart, y, LONGEST * value / longest)
            y += BAR + GAP
    height = y + MARGIN - GAP
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{STYLE}</style>",
            f'<rect class="back" width="{WIDTH}" height="{height}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _bar(name: str, value: float, chart: Chart, y: int, length: float) -> list[str]:
    ratio = chart.ratio(value)
    label = f"{value:.4g}" + (f"   {ratio:.3f}×" if ratio is not None else "")
    text = y + BAR - 7
    kind = "ours" if "fxshard" in name else "peer"
    return [
        f'<text x="{MARGIN + LABELS - 10}" y="{text}" text-anchor="end">{escape(name)}</text>',
        f'<rect class="{kind}" x="{MARGIN + LABELS}" y="{y}" width="{max(length, 1):.1f}" height="{BAR}" rx="3"/>',
        f'<text class="note" x="{MARGIN + LABELS + length + 8:.1f}" y="{text}" xml:space="preserve">{label}</text>',
    ]
