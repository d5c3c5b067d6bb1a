"""What is put off until the first step has been taken is done then, once, in a thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import fxshard
from fxshard.helpers import beside, first_step
from tests.toy import Mlp


class Notes:
    """Who wants to do something, and in which thread it was done."""

    def __init__(self) -> None:
        self.done: list[threading.Thread] = []

    def note(self) -> None:
        self.done.append(threading.current_thread())


@pytest.fixture
def notes() -> Notes:
    made = Notes()
    first_step.put_off(made.note)
    return made


@pytest.fixture
def model() -> fxshard.ShardedModule:
    return fxshard.compile(Mlp(), optimizer=fxshard.AdamW(), lowering="eager")


def loss(model: fxshard.ShardedModule) -> torch.Tensor:
    return model(torch.randn(4, 7), torch.randn(4, 5))  # type: ignore[no-any-return]


def backward_and_step(model: fxshard.ShardedModule) -> None:
    loss(model).backward()
    model.optimizer.step()


def forward_twice(model: fxshard.ShardedModule) -> None:
    loss(model)
    loss(model)


@pytest.mark.parametrize("take", [backward_and_step, forward_twice])
def test_it_is_done_once(
    notes: Notes, model: fxshard.ShardedModule, take: Callable[[fxshard.ShardedModule], None]
) -> None:
    take(model)
    take(model)
    beside.finish_all()
    assert len(notes.done) == 1 and notes.done[0] is not threading.current_thread()


def test_not_before(notes: Notes, model: fxshard.ShardedModule) -> None:
    other = Notes()
    first_step.put_off(other.note)
    loss(model).backward()
    beside.finish_all()
    assert not notes.done and not other.done
    first_step.taken()
    beside.finish_all()
    assert len(notes.done) == len(other.done) == 1


def test_what_nobody_has_any_more_is_not_done() -> None:
    notes = Notes()
    first_step.put_off(notes.note)
    done = notes.done
    del notes
    first_step.taken()
    beside.finish_all()
    assert not done


def test_a_program_that_takes_no_step_does_it_at_its_end(tmp_path: Path) -> None:
    script = """
import pathlib, sys
from fxshard.helpers import first_step
class Wanted:
    def write(self):
        pathlib.Path(sys.argv[1]).touch()
wanted = Wanted()
first_step.put_off(wanted.write)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "written")], check=True, timeout=60)
    assert (tmp_path / "written").exists()


def test_nobody_stays_behind_it() -> None:
    with mock.patch.object(first_step, "dismiss") as dismiss:
        first_step.taken()
    dismiss.assert_called_once_with()
