"""The command line that benchmarks share, and rows of figures as a table on a terminal, as a file, and as bars in an
SVG file. Importing it does not import torch."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

DEVICES = ("cpu", "cuda")


def parser_of(about: str | None, name: str | None = None) -> argparse.ArgumentParser:
    """The options that all have. ``about``: the docstring of a benchmark, of which the first line counts."""
    parser = argparse.ArgumentParser(prog=name, description=(about or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    import torch

    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=DEVICES, default=best, help=f"(default here: {best})")


def listed(known: Iterable[str], others: Callable[[str], bool] = lambda name: False) -> Callable[[str], list[str]]:
    """A type for ``add_argument``: names with commas in between, each of them known, or one of ``others``."""
    names = list(known)

    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in names and not others(name):
                raise argparse.ArgumentTypeError(f"no {name!r}; there are {', '.join(names)}")
        return text.split(",")

    return parse


def numbers(text: str) -> list[int]:
    """A type for ``add_argument``: numbers with commas in between."""
    return [int(number) for number in text.split(",")]


def in_fresh_process(*command: str, **options: Any) -> dict[str, Any]:
    """Run ``command`` in a new Python and parse its last line as JSON."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True, **options)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


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
    return svg(WIDTH, height, body)


def svg(width: int, height: int, body: Sequence[str]) -> str:
    """A drawing on a background that fits the viewer's theme."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    back = f'<rect class="back" width="{width}" height="{height}"/>'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>", back]
    return "\n".join([*head, *body, "</svg>\n"])


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


Row = dict[str, Any]
"""Figures by the keys of columns; ``name`` is what was measured."""


@dataclass(frozen=True)
class Column:
    """One figure of every row."""

    key: str
    title: str
    form: str = ".1f"
    ratio: bool = False
    """Whether the ratio to that of the base is a column as well."""
    bars: str = ""
    """The title of its bars; without one, there are no bars. Times and sizes: shorter is better."""
    unit: str = ""
    """The unit of its bars."""


@dataclass(frozen=True)
class Table:
    """Rows that are compared with one of them, if there is a ``base``."""

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]
    base: str | None = None
    names: str = ""
    """Title of the first column."""

    @property
    def head(self) -> list[str]:
        return [self.names, *(title for column in self.columns for title in (column.title, *["ratio"] * column.ratio))]

    def cells(self, row: Row) -> list[str]:
        """A row as text. What was not measured is a dash."""
        base = next((each for each in self.rows if each["name"] == self.base), {})
        found = [row["name"]]
        for column in self.columns:
            value, reference = row.get(column.key), base.get(column.key)
            found.append(_cell(value, column.form))
            if column.ratio:
                found.append(_cell(value / reference if value is not None and reference else None, ".3f"))
        return found

    def __str__(self) -> str:
        lines = [self.head, *map(self.cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        texts[0] += f"   base: {self.base}" if self.base is not None else ""
        return "\n".join([self.title, *texts] if self.title else texts)

    def charts(self) -> list[Chart]:
        """Bars of the columns that have some."""
        found = []
        for column in self.columns:
            bars = tuple((row["name"], row[column.key]) for row in self.rows if row.get(column.key))
            if column.bars and bars:
                found.append(Chart(f"{self.title}: {column.bars}", column.unit, bars, self.base))
        return found


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else value if isinstance(value, str) else f"{value:{form}}"


def write(path: Path | None, tables: Sequence[Table]) -> None:
    """To a file, if one is asked for."""
    if path is not None:
        path.write_text(json.dumps([asdict(table) for table in tables], indent=1), encoding="utf-8")


def read(path: Path) -> list[Table]:
    return [
        Table(**{**table, "columns": tuple(Column(**column) for column in table["columns"])})
        for table in json.loads(path.read_text(encoding="utf-8"))
    ]
