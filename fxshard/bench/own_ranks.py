"""Ranks of a process group for one architecture, forked from a process that has imported what they need.

They are gone afterwards, and so is whatever they broke.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
import warnings
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from fxshard.bench.examine import RANKS, Depths, examine
from fxshard.bench.small_models import Architecture

PRELOADED = ["fxshard.bench.own_ranks", "fxshard.frontend.api", "torch.distributed.fsdp", "transformers.modeling_utils"]
"""What every rank imports: imported once, by the process that ranks are forked from."""
GOODBYE = 5.0
"""Seconds for a rank to end after it, or the other one, has said all."""
WAITS = "the other rank failed"
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
        ranks = [_start(architecture, depths, rank, folder) for rank in range(RANKS)]
        found: list[Row] = []
        try:
            found = _gather(ranks, timeout)
        finally:
            done = bool(found) and not any(each["failed"] for each in found)
            for process, receiver in ranks:
                process.join(GOODBYE if done else 0.0)
                process.kill()
                process.join()
                receiver.close()
    failed = sorted((each["failed"] for each in found if each["failed"]), key=lambda why: why == WAITS)
    counts = {layers: count for each in found for layers, count in each.get("compilations", {}).items()}
    return {**row, **found[0], "compilations": counts, "failed": failed[0] if failed else None, "ranks": found}


def _start(architecture: Architecture, depths: Depths, rank: int, folder: str) -> tuple[ForkServerProcess, Connection]:
    context = get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(architecture, depths, rank, folder, sender), daemon=True)
    process.start()
    sender.close()  # the rank has a copy: when it ends, the pipe does
    return process, receiver


def _gather(ranks: list[tuple[ForkServerProcess, Connection]], timeout: float) -> list[Row]:
    """What each rank sent. The first that fails ends the other's time, which may be waiting for it."""
    found: dict[int, Row] = {}
    waiting = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    deadline, late = time.monotonic() + timeout, f"not done after {timeout:.0f} s"
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            found |= {rank: {"failed": late} for rank in waiting.values()}
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            found[rank] = _received(receiver, ranks[rank][0])
            if found[rank]["failed"]:
                deadline, late = min(deadline, time.monotonic() + GOODBYE), WAITS
    return [found[rank] for rank in sorted(found)]


def _received(receiver: Connection, process: ForkServerProcess) -> Row:
    try:
        row: Row = json.loads(receiver.recv_bytes())
    except EOFError:
        process.join(GOODBYE)
        return {"failed": f"the process ended with exit code {process.exitcode}"}
    return row


def _run(architecture: Architecture, depths: Depths, rank: int, folder: str, sender: Connection) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    store = dist.FileStore(str(Path(folder, "store")), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    try:
        found = examine(architecture, rank, depths)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        found = {"failed": f"{type(error).__name__}: {error}", "where": where}
    sender.send_bytes(json.dumps(found).encode())
    sender.close()
    if found["failed"]:
        time.sleep(2 * GOODBYE)  # a peer that saw this rank's connections close would fail too, and say only that
        os._exit(1)  # a group that a peer waits in cannot be closed in order
