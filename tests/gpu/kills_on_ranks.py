"""``kill -9`` and SIGSTOP of one of two NCCL ranks at each kind of event of a step: the other ends within the process
group's timeout and has said at which of its own events, and the checkpoint of the step before loads. Not by torchrun,
which would end the others itself:

python -m tests.gpu.kills_on_ranks
"""

from __future__ import annotations

import datetime
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import fxshard
from tests.forks import START
from tests.test_kills import EVENT, KINDS, SIGNALS, Case, run
from tests.toy import Linears

TIMEOUT = 20.0
SLACK = 10.0
"""Seconds more, in which torch's watchdog notices and ends the process."""
WATCHDOG = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}
"""After a timeout torch's watchdog waits four times as long before it ends the process: a minute by default."""
CASES: list[Case] = [(kind, how) for kind in KINDS for how in SIGNALS]


def train(rank: int, kind: str, how: str, folder: Path) -> None:
    logging.basicConfig()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), 2)
    start = datetime.timedelta(seconds=START)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=start, device_id=device)
    dist.barrier()  # from here on both are equally far
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT))
    model = fxshard.compile(Linears().to(device), optimizer=fxshard.AdamW(), lowering="eager")
    run(model, torch.ones(2, 8, device=device), kind, how, folder)
    torch.cuda.synchronize()  # nothing of a step waits for the device


def check(case: Case, folder: Path, left: subprocess.Popen[bytes]) -> None:
    while left.poll() is None and not _late(folder):
        time.sleep(0.2)
    text = (folder / "0").read_text()
    assert left.poll() not in (None, 0), f"{case}: rank 0 {'goes on' if left.poll() is None else 'ended well'}\n{text}"
    seconds = (folder / "0").stat().st_mtime - (folder / "happened").stat().st_mtime
    assert seconds < TIMEOUT + SLACK, f"{case}: rank 0 ended {seconds:.0f} s after"
    named = re.search(rf"rank 0: {EVENT} (has not finished|failed)", text)
    assert named, f"{case}: rank 0 did not say at which event\n{text}"
    again = fxshard.shard(Linears(), optimizer=fxshard.AdamW())
    assert fxshard.load(again, folder).path == folder / "step-1"
    expected = torch.load(folder / "expected-0", map_location="cpu")
    assert all(torch.equal(value.cpu(), expected[name]) for name, value in again.full_state_dict().items())
    print(f"{' '.join(case)}: exit {left.returncode} within {seconds:.0f} s; {named[0]}", flush=True)


def _late(folder: Path) -> bool:
    mark = folder / "happened"
    return mark.exists() and time.time() - mark.stat().st_mtime > TIMEOUT + 2 * SLACK


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folders = {case: Path(temporary) / "-".join(case) for case in CASES}
        processes: dict[tuple[Case, int], subprocess.Popen[bytes]] = {}
        for case, folder in folders.items():
            folder.mkdir()
            for rank in range(2):
                command = [sys.executable, "-m", "tests.gpu.kills_on_ranks", str(rank), *case, str(folder)]
                with (folder / str(rank)).open("wb") as says:
                    processes[case, rank] = subprocess.Popen(
                        command, stdout=says, stderr=says, env={**os.environ, **WATCHDOG}
                    )
        try:
            for case, folder in folders.items():
                check(case, folder, processes[case, 0])
        finally:
            for each in processes.values():
                each.kill()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        main()
