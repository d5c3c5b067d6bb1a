"""What each of the crew runs: ``python -m fxshard.helpers.member DIRECTORY COUNT DEVICE``.

One process imports torch and forks the others, so that it is imported once. It does not use CUDA: no process forked
from it could. Where they will make CUDA contexts, for which they wait a second, they import the rest of torch's
compiler meanwhile, each for itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from fxshard.helpers import beside
from fxshard.helpers.crew import DONE, HERE, KERNELS, NUMBER, QUEUE
from fxshard.log import LOG
from fxshard.stack import in_one_piece

CACHE = "TRITON_CACHE_DIR"
MOST_KERNELS = 4
"""Processes for kernels of ours; experts have four kernels."""


def main(directory: Path, count: int, device: int | None = None) -> int:
    """Fork the crew and stay until all have gone home; if one of them dies, send the others home."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    gpu = is_there_a_gpu()
    with _kernels_in(directory / "triton"):
        members = {_fork(partial(serve_kernels, directory)) for _ in range(processes_for_kernels(count) if gpu else 0)}
        prepare(gpu)
    gc.freeze()
    members.update(_fork(partial(serve, directory, device)) for _ in range(count))
    while members:
        member, status = os.wait()
        members.discard(member)
        if status != 0:  # whoever waits for its job must learn of it
            os.killpg(0, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)  # the owner has gone without a word
    return 0


def _fork(act: Callable[[], None]) -> int:
    member = os.fork()
    if member == 0:
        act()
        os._exit(0)
    return member


def is_there_a_gpu() -> bool:
    """Whether kernels will be wanted; torch is imported to know it."""
    import torch

    return torch.cuda.device_count() > 0


def processes_for_kernels(count: int) -> int:
    """Half as many as the crew has members."""
    return min((count + 1) // 2, MOST_KERNELS)


def prepare(gpu: bool) -> None:
    """Import for all forks what these have no time for. Triton's files are hashed in a thread: they are large."""
    from fxshard import _compat

    if gpu:
        import fxshard.first_kernel  # noqa: F401  and Triton, by this thread

        beside.begin("hash Triton", _compat.triton_hasher())
        _compat.import_dynamo()
        beside.finish()
    else:
        _compat.import_inductor()


def _compile_first_kernel() -> None:
    """Nobody wants it, and no two processes have the same: the first takes longest, and forks have it behind them."""
    from fxshard.first_kernel import compile_copy

    compile_copy(os.getpid())


def serve_kernels(directory: Path) -> None:
    """One of those who compile kernels, from its fork to its end."""
    from fxshard.fused import ahead, hopper_products  # noqa: F401

    _compile_first_kernel()
    work(directory, KERNELS)


def serve(directory: Path, device: int | None) -> None:
    """One of the crew, from its fork to its end."""
    from fxshard import _compat

    if device is not None:
        beside.begin("make a context", partial(_make_context, device))  # there is enough to do meanwhile
    _compat.import_inductor()
    if is_there_a_gpu():
        with _kernels_in(directory / "triton"):
            _compile_first_kernel()
    _compat.hash_torch()
    import fxshard.helpers.packing
    import fxshard.operators  # noqa: F401  which segments call

    beside.finish()
    _compat.start_kernel_processes()  # ahead of the files: forks would keep them open
    work(directory)
    _compat.stop_kernel_processes()


def _make_context(device: int) -> None:
    """Use a GPU for the first time, which takes half a second. Where it cannot be used jobs will find so, too."""
    import torch

    torch.empty(1, device=torch.device("cuda", device))


@contextlib.contextmanager
def _kernels_in(cache: Path) -> Iterator[None]:
    """What is compiled inside goes there; jobs say where theirs goes."""
    given = os.environ.get(CACHE)
    os.environ[CACHE] = str(cache)
    try:
        yield
    finally:
        if given is None:
            del os.environ[CACHE]
        else:
            os.environ[CACHE] = given


def work(directory: Path, queue: str = QUEUE) -> None:
    """Do what a queue says until it is closed, or the owner has gone: then there is nobody to open a file with, or to
    write to. That is no failure, for which the others would be sent home before they have cleared up.
    """
    with contextlib.suppress(OSError):
        _work(directory, queue)


def _work(directory: Path, queue: str) -> None:
    # Opened without waiting for the other side, which may be gone already.
    done = os.open(directory / DONE, os.O_WRONLY | os.O_NONBLOCK)
    jobs = os.open(directory / queue, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(jobs, True)
    if queue == QUEUE:
        os.write(done, HERE.to_bytes(NUMBER, "little"))
    while number := os.read(jobs, NUMBER):
        job = directory / f"{int.from_bytes(number, 'little')}.job"
        if not job.exists():  # withdrawn
            continue
        started = time.perf_counter()
        try:
            pickle.loads(job.read_bytes())()
        except Exception:  # whoever wants what it compiles does it again, and says what is wrong with it
            job.with_suffix(".error").write_text(traceback.format_exc())
        LOG.debug("process %d, job %s: %.2f s", os.getpid(), job.stem, time.perf_counter() - started)
        os.write(done, number)


if __name__ == "__main__":
    given_directory, given_count, given_device = sys.argv[1:]
    which = int(given_device) if given_device else None
    sys.exit(in_one_piece(main, Path(given_directory), int(given_count), which))
