"""A rank that dies, raises or goes its own way: the others end with an error that says where, in time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import fxshard
from tests.forks import join, last_words, load_compiler, on_ranks
from tests.toy import Linears

GATHER = r"(forward|optimizer) unshard of 'layers.\d'"
KILLED = {
    "killed ahead of clipping": "all_reduce of the gradient norm",
    "killed ahead of Muon's step": "optimizer all_reduce of whether gradients are finite",
    "killed in Muon's step": r"optimizer exchange of 'layers.\d'",
}
"""By case: the event that the rank that is left alone names."""
TIMEOUTS = {**dict.fromkeys(KILLED, 600.0), "stuck": 5.0, "another graph": 5.0, "saves alone": 5.0}
"""By case: the timeout of collectives, once both ranks are there."""


class SomeUsed(Linears):
    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        for layer in self.layers[:used]:
            x = torch.tanh(layer(x))
        return x.square().mean()


def train(rank: int, case: str, folder: Path) -> None:
    """Three steps; in the second rank 1 misbehaves, or rank 0 does what both have to do."""
    join(rank, 2, folder, TIMEOUTS[case])
    muon = "Muon" in case
    optimizer = fxshard.Muon() if muon else fxshard.AdamW()
    layout = "rows" if muon else "auto"
    model = fxshard.compile(SomeUsed(width=16), optimizer=optimizer, layout=layout, lowering="eager")
    for step in range(3):
        misbehaves = case if step == 1 and rank == 1 else ""
        used = 2 if misbehaves == "another graph" else 3
        if misbehaves == "stuck":
            time.sleep(300)
        if case == "saves alone" and step == 1 and rank == 0:
            model.full_state_dict()
        model(torch.ones(2, 16), used).backward()
        if misbehaves in ("killed ahead of clipping", "killed ahead of Muon's step"):
            die()
        if case == "killed ahead of clipping":
            model.clip_grad_norm_(1.0)
        with mock.patch("torch.distributed.all_to_all_single", die) if misbehaves else contextlib.nullcontext():
            model.optimizer.step()
        model.optimizer.zero_grad()


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, float]]]:
    """By case: what the rank that is left alone wrote, and after how many seconds it ended.

    All cases run at once, since most of the time is spent waiting, and in forked processes, which have torch loaded.
    """
    load_compiler()
    folders = {case: tmp_path_factory.mktemp(re.sub(r"\W", "_", case)) for case in TIMEOUTS}
    started = time.monotonic()
    found = {}
    with on_ranks(2, train, folders) as processes:
        for case, folder in folders.items():
            speaker = 1 if case == "another graph" else 0  # there it is rank 1 that is alone, with a new program
            text = last_words(processes[case, speaker], folder / str(speaker))
            found[case] = (text, time.monotonic() - started)
        yield found


Said = dict[str, tuple[str, float]]


@pytest.mark.parametrize("case", KILLED)
def test_a_rank_that_is_killed_ends_the_others(said: Said, case: str) -> None:
    text, seconds = said[case]
    assert re.search(rf"PeerError: rank 0: {KILLED[case]} failed", text), text
    assert seconds < 170  # as soon as its connections close, not after the timeout


def test_a_rank_that_is_stuck_is_reported_and_then_given_up(said: Said) -> None:
    text, _ = said["stuck"]
    assert re.search(rf"rank 0: {GATHER} has not finished for \d+ s", text)  # half-way, a watchdog
    assert re.search(rf"PeerError: rank 0: {GATHER} failed", text)


def test_a_rank_that_saves_alone_is_told_so(said: Said) -> None:
    text, _ = said["saves alone"]
    assert re.search(r"rank 0 has waited at full_state_dict\(\) for \d+ s: it is collective", text), text
    assert "PeerError: rank 0: full_state_dict() failed" in text


def test_a_program_that_one_rank_alone_compiled(said: Said) -> None:
    text, _ = said["another graph"]
    assert "PeerError: rank 1 compiled a program that communicates in a new way" in text
    assert "layers.2" in text
