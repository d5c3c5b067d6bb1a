"""Tables as a benchmark prints them, in Markdown, read back."""

from __future__ import annotations

from typing import Any


def read_tables(text: str) -> list[dict[str, Any]]:
    """[{title, head, rows}] of the tables in a text; the heading above a table is its title."""
    tables: list[dict[str, Any]] = []
    title, inside = "", False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("#"):
            title = line.lstrip("# ")
        if not line.startswith("|"):
            inside = False
        elif not inside:
            inside = True
            tables.append({"title": title, "head": cells, "rows": []})
        elif not line.startswith("|---"):
            tables[-1]["rows"].append(cells)
    return tables
