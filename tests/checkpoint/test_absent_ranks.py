"""Ranks that do not come to a save or a load: the others end in time, with an error that names them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import fxshard
from tests.checkpoint.zoo import ADAMW, same, zoo
from tests.forks import join, last_words, on_ranks

RANKS = 3
TIMEOUT = 5.0
"""Of the process group, once all ranks are there."""
AGAIN = 4.0
"""Seconds after the timeout in which a process ends that noticed it: a busy machine."""
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
CASES = ["only rank 0 saves", "only rank 0 loads", "stopped in a save", "killed in a save", "stopped in the background"]


def run(rank: int, case: str, folder: Path) -> None:
    """Save once; then rank 2 misbehaves, or all but rank 0 do."""
    join(rank, RANKS, folder, TIMEOUT)
    model = fxshard.shard(zoo(), optimizer=ADAMW)
    if case != "only rank 0 saves":  # there the ranks have not even met for a checkpoint before
        fxshard.save(model, folder / "step-1")
    dist.barrier()
    (folder / f"began {rank}").touch()
    if case.startswith("only") and rank != 0:
        time.sleep(300)
    if case == "only rank 0 loads":
        fxshard.load(model, folder)
    fxshard.save(
        model, folder / "step-2", asynchronous="background" in case, progress=lambda *_: misbehave(rank, case)
    ).wait()


def misbehave(rank: int, case: str) -> None:
    if rank == 2 and case.split()[0] in SIGNALS:
        os.kill(os.getpid(), SIGNALS[case.split()[0]])


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, int], tuple[str, float, Path]]]:
    """{(case, rank): what it wrote, after how many seconds it ended, the folder}, of ranks that are left."""
    folders = {case: tmp_path_factory.mktemp(re.sub(r"\W", "_", case)) for case in CASES}
    found = {}
    with on_ranks(RANKS, run, folders) as processes:
        for (case, rank), process in processes.items():
            if rank == 0 or (rank == 1 and not case.startswith("only")):
                text = last_words(process, folders[case] / str(rank))
                began = (folders[case] / f"began {rank}").stat().st_mtime
                took = (folders[case] / str(rank)).stat().st_mtime - began  # its last words are the error
                found[case, rank] = (text, took, folders[case])
        yield found


Ended = dict[tuple[str, int], tuple[str, float, Path]]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("only")])
def test_ranks_that_never_call_are_named(ended: Ended, case: str) -> None:
    text, seconds, folder = ended[case, 0]
    doing = "saving" if "saves" in case else "loading"
    assert re.search(rf"PeerError: rank 0, {doing} .*: ranks 1, 2 did not come within the timeout", text), text
    assert TIMEOUT / 4 < seconds < TIMEOUT + AGAIN, text
    assert not list(folder.glob("step-2*"))


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("only")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_gone_in_a_save_is_named(ended: Ended, case: str, rank: int) -> None:
    text, seconds, folder = ended[case, rank]
    assert re.search(rf"PeerError: rank {rank}, saving .*step-2: rank 2 did not come within", text), text
    assert seconds < TIMEOUT + AGAIN
    if case.startswith("killed"):
        assert seconds < TIMEOUT
    assert not list(folder.glob("step-2*"))  # neither a checkpoint nor its beginning
    again = fxshard.shard(zoo(1), optimizer=ADAMW)
    assert fxshard.load(again, folder).path == folder / "step-1"
    assert same(again.full_state_dict(), zoo().state_dict()) == []
