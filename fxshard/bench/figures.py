"""What benchmarks find: rows of figures, as a table on a terminal, as a file, and as bars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxshard.bench.chart import Chart

Row = dict[str, Any]
"""Figures by the keys of columns; ``name`` is what was measured."""


@dataclass(frozen=True)
class Column:
    """One figure of every row."""

    key: str
    title: str
    form: str = ".1f"
    ratio: bool = False
    """Whether the ratio to that of the base stands beside it."""
    bars: str = ""
    """What bars of it are called. Times and sizes: shorter is better."""
    unit: str = ""
    """Of bars."""


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
