"""Processes that may be killed, forked from the tests' own: they have torch and the compiler loaded already."""

from __future__ import annotations

import contextlib
import datetime
import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

START = 150.0
"""Seconds that processes may take to start."""


def load_compiler() -> None:
    """Compile something, once, before forking: or each process would load the compiler by itself."""
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()


def fork(
    says: Path, environment: dict[str, str], fn: Callable[..., object], *args: Any
) -> multiprocessing.process.BaseProcess:
    """Start ``fn(*args)`` in a process of its own. What it prints, logs and raises goes to the file ``says``."""
    process = multiprocessing.get_context("fork").Process(target=_live, args=(says, environment, fn, args), daemon=True)
    process.start()
    return process


@contextlib.contextmanager
def on_ranks(
    world: int, fn: Callable[[int, Any, Path], object], folders: Mapping[Any, Path]
) -> Iterator[dict[tuple[Any, int], multiprocessing.process.BaseProcess]]:
    """``fn(rank, case, folder)`` for all cases at once, by case and rank; what is left at the end is killed."""
    processes = {
        (case, rank): fork(folder / str(rank), {}, fn, rank, case, folder)
        for case, folder in folders.items()
        for rank in range(world)
    }
    try:
        yield processes
    finally:
        for each in processes.values():
            each.kill()
            each.join()


def join(rank: int, world: int, folder: Path, timeout: float) -> None:
    """Join a process group that has this timeout once all its ranks are there: starting may take longer."""
    start = datetime.timedelta(seconds=START)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=start)
    dist.barrier()  # from here on all are equally far: what one waits for another is not its start
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout))


def last_words(process: multiprocessing.process.BaseProcess, says: Path) -> str:
    """What a process wrote that must end with an error."""
    process.join(timeout=170)
    text = says.read_text()
    assert process.exitcode == 1, f"{says}: {process.exitcode}\n{text}"
    return text


def _live(says: Path, environment: dict[str, str], fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    with says.open("w", buffering=1) as file:
        sys.stdout = sys.stderr = file
        logging.basicConfig(stream=file, force=True)
        os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **environment})
        torch.set_num_threads(1)  # those of the parent are not there
        try:
            fn(*args)
        except BaseException:
            traceback.print_exc()
            file.flush()
            os._exit(1)
    os._exit(0)
