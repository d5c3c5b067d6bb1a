"""``python -m fxshard.fuzz --minutes 30 --ranks 2``: random programs until the time is over; findings with seeds."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fxshard.bench.fuzz.compare import run_program


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fxshard.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to go on")
    parser.add_argument("--programs", type=int, default=10**9, help="how many programs at most")
    parser.add_argument("--ranks", type=int, default=1, help="CPU ranks (gloo)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.ranks, str(Path(folder, "store")), given.seed, given.minutes * 60, given.programs)
        torch.multiprocessing.spawn(work, arguments, nprocs=given.ranks)


def work(rank: int, ranks: int, store: str, seed: int, seconds: float, programs: int) -> None:
    """Run programs on one of the ranks; ends with 1 if something was found."""
    if ranks > 1:  # one rank needs no process group
        shared, patience = dist.FileStore(store, ranks), timedelta(seconds=120)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=ranks, timeout=patience)
    end, said, counts = time.monotonic() + seconds, time.monotonic(), Counter[str]()
    for number in range(programs):
        over = torch.tensor(int(time.monotonic() > end))
        if ranks > 1:
            dist.all_reduce(over, dist.ReduceOp.MAX)
        if over:
            break
        torch._dynamo.reset()
        outcome = run_program(seed + number, zero=(seed + number) % 4)
        counts[outcome.kind] += 1
        if rank == 0 and time.monotonic() > said + 30:
            said = time.monotonic()
            print(f"{sum(counts.values())} programs so far: {dict(counts)}", flush=True)
        if outcome.kind != "same":
            text = outcome.text if outcome.kind != "refused" else outcome.text.splitlines()[0]
            print(f"seed {seed + number}, ZeRO-{(seed + number) % 4}, rank {rank}: {outcome.kind}: {text}", flush=True)
    if rank == 0:
        print(f"{sum(counts.values())} programs on {ranks} rank(s): {dict(counts)}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()
    sys.exit(int(bool(counts["different"] or counts["crashed"])))


if __name__ == "__main__":
    main()
