"""kill -9 and SIGSTOP of one rank at each kind of event of a step: the other ends, and says at which of its own events.

The checkpoint of the step before loads on the ranks that are left.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxshard
from tests.forks import join, last_words, load_compiler, on_ranks
from tests.thorough import thorough
from tests.toy import Linears
from tests.training import train_step

SOON = 20.0
"""Seconds in which a closed connection is noticed; far less than the timeout, even on a busy machine."""
TIMEOUTS = {"killed": 600.0, "stopped": 5.0}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
KINDS = ("unshard", "wait", "reshard", "grad", "reduce", "finish", "carry")
"""What the engine carries out in a step; ``carry`` is after the update of a bucket."""
EVENT = r"(forward|backward|optimizer) (unshard|reduce) of 'layers.\d'"
Case = tuple[str, str]


def train(rank: int, case: Case, folder: Path) -> None:
    kind, how = case
    join(rank, 2, folder, TIMEOUTS[how])
    model = fxshard.compile(Linears(), optimizer=fxshard.AdamW(), lowering="eager")
    run(model, torch.ones(2, 8), kind, how, folder)


def run(model: fxshard.ShardedModule, batch: torch.Tensor, kind: str, how: str, folder: Path) -> None:
    """A step, a save, and steps in the first of which something happens to rank 1 at its second event of a kind."""
    rank = dist.get_rank()
    train_step(model, batch)
    fxshard.save(model, folder / "step-1")
    torch.save(model.full_state_dict(), folder / f"expected-{rank}")
    if rank == 1:
        engine = model._sharding.engine
        owner = engine.gradients if kind in ("grad", "reduce", "finish") else engine
        setattr(owner, kind, second_call(getattr(owner, kind), SIGNALS[how], folder / "happened"))
    for _ in range(3):
        train_step(model, batch)


def second_call(act: Callable[..., Any], number: signal.Signals, mark: Path) -> Callable[..., Any]:
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            mark.touch()
            os.kill(os.getpid(), number)
        return act(*args, **kwargs)

    return counted


CASES: list[Case] = [("unshard", "killed"), ("reduce", "killed"), ("reduce", "stopped")]
MORE: list[Case] = [(kind, how) for kind in KINDS for how in SIGNALS if (kind, how) not in CASES]


@pytest.fixture(scope="module")
def left(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[Case, tuple[str, float, Path]]]:
    """By case: what rank 0 wrote, how many seconds after it happened it ended, and the folder of checkpoints."""
    load_compiler()
    asked = {item.callspec.params["case"] for item in request.session.items if item.path == Path(__file__)}
    folders = {case: tmp_path_factory.mktemp("-".join(case)) for case in (*CASES, *MORE) if case in asked}
    found = {}
    with on_ranks(2, train, folders) as processes:
        for case, folder in folders.items():
            text = last_words(processes[case, 0], folder / "0")
            seconds = (folder / "0").stat().st_mtime - (folder / "happened").stat().st_mtime
            found[case] = (text, seconds, folder)
        yield found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", [*CASES, *map(thorough, MORE)], ids=" ".join)
def test_the_rank_that_is_left_ends(left: dict[Case, tuple[str, float, Path]], case: Case) -> None:
    text, seconds, folder = left[case]
    assert re.search(rf"PeerError: rank 0: {EVENT} failed", text), text
    assert seconds < (SOON if case[1] == "killed" else TIMEOUTS["stopped"] + SOON), text

    again = fxshard.shard(Linears(), optimizer=fxshard.AdamW())  # on one rank
    assert fxshard.load(again, folder).path == folder / "step-1"
    expected = torch.load(folder / "expected-0")
    assert all(torch.equal(value, expected[name]) for name, value in again.full_state_dict().items())
