"""A rank that dies, raises or goes its own way: the others end with an error that says where, in time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
GATHER = r"(forward|optimizer) unshard of 'layers.\d'"

SCRIPT = """
import datetime, logging, os, signal, sys, time
import torch, torch.distributed as dist
sys.path.insert(0, os.environ["ROOT"])
import fxshard
from torch import nn

logging.basicConfig()
torch.set_num_threads(1)
rank, case = int(sys.argv[1]), sys.argv[2]
timeout = datetime.timedelta(seconds=int(sys.argv[4]))
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], 2), rank=rank, world_size=2, timeout=timeout)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    def forward(self, x, used):
        for layer in self.layers[:used]:
            x = torch.tanh(layer(x))
        return x.square().mean()

model = fxshard.compile(Net(), optimizer=fxshard.AdamW(), lowering="eager")
x = torch.ones(2, 8)
for step in range(3):
    used = 3
    if step == 1 and rank == 1:
        if case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif case == "stuck":
            time.sleep(300)
        elif case == "another graph":
            used = 2
    model(x, used).backward()
    model.optimizer.step()
    model.optimizer.zero_grad()
"""


def run(case: str, store: Path, timeout: int) -> tuple[str, float]:
    """What rank 0 wrote to its error output, and how long it took; rank 1 misbehaves in the second step.

    In case "another graph" it is rank 1 that is alone with a new program, and its words that come back.
    """
    environment = {**os.environ, "ROOT": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), case, str(store), str(timeout)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    speaker = 1 if case == "another graph" else 0
    try:
        _, said = processes[speaker].communicate(timeout=170)
        assert processes[speaker].returncode != 0, said
        return said, time.monotonic() - start
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    said, seconds = run("killed", tmp_path / "store", timeout=600)
    assert re.search(rf"PeerError: rank 0: {GATHER} failed", said)
    assert seconds < 170  # as soon as its connections close, not after the timeout


def test_a_rank_that_is_stuck_is_reported_and_then_given_up(tmp_path: Path) -> None:
    said, _ = run("stuck", tmp_path / "store", timeout=8)
    assert re.search(rf"rank 0: {GATHER} has not finished for \d+ s", said)  # half-way, a watchdog
    assert re.search(rf"PeerError: rank 0: {GATHER} failed", said)


def test_a_program_that_one_rank_alone_compiled(tmp_path: Path) -> None:
    said, _ = run("another graph", tmp_path / "store", timeout=8)
    assert "PeerError: rank 1 compiled a program that communicates in a new way" in said
    assert "layers.2" in said
