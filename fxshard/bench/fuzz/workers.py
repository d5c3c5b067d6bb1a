"""Ranks that run random programs until the time is over, and say what they found."""

from __future__ import annotations

import sys
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from fxshard.bench.fuzz.compare import Outcome, run_program


def spawned(rank: int, ranks: int, store: str, seed: int, seconds: float, programs: int) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    failed = work(rank, ranks, store, seed, seconds, programs)
    dist.destroy_process_group()
    sys.exit(failed)


def work(rank: int, ranks: int, store: str, seed: int, seconds: float, programs: int) -> int:
    """Run programs; 1 if something was found."""
    end, counts = time.monotonic() + seconds, Counter[str]()
    for number in range(programs):
        if _any_rank(time.monotonic() > end):
            break
        torch._dynamo.reset()
        outcome = run_program(seed + number, zero=number % 4)
        counts[outcome.kind] += 1
        if outcome.kind != "same":
            _say(seed + number, number % 4, rank, outcome)
    if rank == 0:
        print(f"{sum(counts.values())} programs on {ranks} rank(s): {dict(counts)}", flush=True)
    return int(bool(counts["different"] or counts["crashed"]))


def _any_rank(condition: bool) -> bool:
    if not dist.is_initialized():
        return condition
    flag = torch.tensor(int(condition))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _say(seed: int, zero: int, rank: int, outcome: Outcome) -> None:
    text = outcome.text if outcome.kind != "refused" else outcome.text.splitlines()[0]
    print(f"seed {seed}, ZeRO-{zero}, rank {rank}: {outcome.kind}: {text}", flush=True)
