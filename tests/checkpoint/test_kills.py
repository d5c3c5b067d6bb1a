"""kill -9 at every file operation of a save: the checkpoint before it loads, and the next save works."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxshard
from tests.checkpoint.zoo import same

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
"""What Python says of what a save does to files, before it does it."""


def die_at(number: int, folder: Path) -> None:
    """Kill this process at a file operation below a folder."""
    seen = 0

    def look(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS and isinstance(args[0], str | os.PathLike) and str(folder) in os.fspath(args[0]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def saves_until(model: fxshard.ShardedModule, path: Path, number: int) -> int:
    """Save in a process of its own, which dies at a file operation; returns how it ended."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # those of this process are not there
        die_at(number, path.parent)
        fxshard.save(model, path, keep=2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.shows("C4")
def test_killed_at_every_file_operation(tmp_path: Path) -> None:
    model = fxshard.shard(torch.nn.Linear(8, 8), optimizer=fxshard.AdamW())
    for step in (1, 2):
        fxshard.save(model, tmp_path / "before" / f"step-{step}")
    before = model.full_state_dict()
    model.load_state_dict({name: value + 1 for name, value in before.items()})
    after = model.full_state_dict()
    again = fxshard.shard(torch.nn.Linear(8, 8), optimizer=fxshard.AdamW())
    names = set()
    for number in range(1, 100):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        ended = saves_until(model, folder / "step-3", number)
        found = fxshard.load(again, folder).path
        names.add(found.name)
        assert same(again.full_state_dict(), after if found.name == "step-3" else before) == [], f"killed at {number}"
        fxshard.save(model, folder / "step-4", keep=1)
        assert os.listdir(folder) == ["step-4"], f"killed at {number}"
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert number > 10 and ended == 0
    assert names == {"step-2", "step-3"}
