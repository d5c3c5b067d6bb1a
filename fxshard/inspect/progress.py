"""A progress bar on a terminal's stderr. Nothing here imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str], None]


@contextmanager
def progress(steps: int, *, shown: bool = True) -> Iterator[Report]:
    """A bar, gone when the work is done; nothing where stderr is no terminal. Call it when a step begins."""
    if not shown or not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=steps, completed=-1)
        yield lambda what: bar.update(task, advance=1, description=what)
