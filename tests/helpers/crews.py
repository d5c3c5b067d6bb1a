"""What tests of crews share: waiting for what other processes do, and looking at them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fxshard.helpers.crew import Crew

ENDED, ASLEEP = "", "import time; time.sleep(600)"
"""What a crew may be instead, to nobody's loss."""


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait for something that other processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened in {seconds} s"
        time.sleep(0.01)


def alive(process: int) -> int | None:
    """The group of a process that runs; one that has ended and waits for its parent does not."""
    try:
        state, _, group, *_ = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(group) if state not in "ZX" else None


def living(group: int) -> list[int]:
    """The processes of a group that run."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [process for process in numbers if alive(process) == group]


def touch(path: Path) -> partial[None]:
    return partial(Path.touch, path)


def ready(helpers: Crew, path: Path, seconds: float = 30) -> Crew:
    """A crew, once it is at work: one that is not there is not waited for."""
    helpers.publish(touch(path))
    until(path.exists, seconds)
    return helpers
