"""Ranks of a process group for one architecture, forked from a process that has imported what they need.

They are gone afterwards, and so is whatever they broke.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from fxshard.bench.examine import RANKS, Depths, examine
from fxshard.bench.small_models import Architecture

PRELOADED = ["fxshard.bench.own_ranks", "fxshard.frontend.api", "torch.distributed.fsdp", "transformers.modeling_utils"]
"""What every rank imports: imported once, by the process that ranks are forked from."""
Row = dict[str, Any]


def preload() -> None:
    """To be called before the first ranks, and in the main process."""
    for variable, value in {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(variable, value)
    get_context("forkserver").set_forkserver_preload(PRELOADED)


def on_ranks(architecture: Architecture, depths: Depths, timeout: float) -> Row:
    """Examine an architecture on ranks of its own: neither a crash nor a hang reaches the caller."""
    row: Row = {"name": architecture.name, "kind": architecture.kind, "model": architecture.model}
    with tempfile.TemporaryDirectory() as folder:
        started = (_run, (architecture, depths, folder), RANKS)
        ranks = mp.start_processes(*started, join=False, daemon=True, start_method="forkserver")
        failed = _wait(ranks, timeout)
        found: list[Row] = []
        for file in sorted(Path(folder).glob("rank-*.json"), key=lambda file: file.stat().st_mtime_ns):
            if failed is None:  # the first that fails is why others do
                found.append(json.loads(file.read_text()))
                failed = found[-1]["failed"]
    if failed is not None:
        return {**row, "failed": failed, "ranks": [{"failed": failed}]}
    found.sort(key=lambda each: int(each["rank"]))
    counts = {layers: count for each in found for layers, count in each["compilations"].items()}
    return {**row, **found[0], "compilations": counts, "ranks": found}


def _wait(ranks: mp.ProcessContext, timeout: float) -> str | None:
    """For the ranks to end. Why they had to, where none of them can say so: a crash, or no time left."""
    deadline = time.monotonic() + timeout
    try:
        while not ranks.join(max(0.0, deadline - time.monotonic())):  # which returns when one of them is done
            if time.monotonic() >= deadline:
                return f"not done after {timeout:.0f} s"
    except mp.ProcessExitedException as error:
        return f"the process ended with exit code {error.exit_code}"
    except mp.ProcessRaisedException:
        return None  # torch ends all of them with the first that fails, which has written down why
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    return None


def _run(rank: int, architecture: Architecture, depths: Depths, folder: str) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    store = dist.FileStore(str(Path(folder, "store")), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    result = Path(folder, f"rank-{rank}.json")
    try:
        result.write_text(json.dumps({"rank": rank, **examine(architecture, rank, depths)}))
    except Exception as error:
        result.write_text(json.dumps({"rank": rank, "failed": f"{type(error).__name__}: {error}"}))
        raise
