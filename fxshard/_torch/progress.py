"""Progress on a terminal's stderr: nothing or, of long benchmarks, lines where that is none.

``FXSHARD_PROGRESS=0`` turns it off.

Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fxshard._torch.log import rank

VARIABLE = "FXSHARD_PROGRESS"
PATIENCE = 2.0
"""Seconds that work inside a training program takes before a line says so."""
WIDTH = 24

Report = Callable[[str], None]
Done = Callable[[int, int], None]
"""Called with how much is done, and of how much."""

_commands = 0
"""Bars of commands that are on the screen: while there is one, nothing else reports progress."""


@contextmanager
def progress(steps: int, *, shown: bool = True, lines: bool = False) -> Iterator[Report]:
    """A bar for a command, gone when the work is done. Call it when a step begins.

    ``lines``: where stderr is no terminal, a line for each step, so that a log shows how far a long run came.
    """
    global _commands
    if not shown or not _wanted():
        started = time.monotonic()
        written = shown and lines and os.environ.get(VARIABLE) != "0"
        yield lambda what: _line(time.monotonic() - started, what) if written else None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        BarColumn(WIDTH),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # What is printed meanwhile goes above the bar, but not to stderr where stdout is redirected to a file.
    above = sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=above) as bar:
        task = bar.add_task("", total=steps)
        begun = itertools.count()
        _commands += 1
        try:
            yield lambda what: bar.update(task, completed=next(begun), description=what)
        finally:
            _commands -= 1


@contextmanager
def long_work(what: str) -> Iterator[Done]:
    """A line about work inside the user's program: on rank 0, if it takes long, erased when the work is done.

    It is written whole, over what the line held, and moves the cursor nowhere else: bars of the program stay intact.
    """
    if rank() != 0 or _commands or not _wanted():
        yield lambda done, total: None
        return
    started = time.monotonic()
    written = False

    def report(done: int, total: int) -> None:
        nonlocal written
        seconds = time.monotonic() - started
        if seconds >= PATIENCE and total:
            written = True
            filled = WIDTH * done // total
            bar = "━" * filled + "╌" * (WIDTH - filled)
            print(f"\r\x1b[2K{bar} {done / total:4.0%} {seconds:4.0f} s  {what}", end="", file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if written:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _line(seconds: float, what: str) -> None:
    print(f"{seconds:6.1f} s  {what}", file=sys.stderr, flush=True)


def _wanted() -> bool:
    return sys.stderr.isatty() and os.environ.get(VARIABLE) != "0"
