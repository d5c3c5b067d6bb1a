"""What each of the crew runs: ``python -m fxshard.helpers.member DIRECTORY COUNT``.

One process imports torch's compiler and forks the others, so that it is imported once. It does not use CUDA: no process
forked from it could.
"""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

from fxshard.helpers import beside
from fxshard.helpers.crew import HERE, NUMBER
from fxshard.log import LOG
from fxshard.stack import in_one_piece


def main(directory: Path, count: int) -> int:
    """Fork the crew and stay until all have gone home; if one of them dies, send the others home."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    prepare(directory)
    gc.freeze()
    members = set()
    for _ in range(count):
        member = os.fork()
        if member == 0:
            serve(directory)
            os._exit(0)
        members.add(member)
    while members:
        member, status = os.wait()
        members.discard(member)
        if status != 0:  # whoever waits for its job must learn of it
            os.killpg(0, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)  # the owner has gone without a word
    return 0


def prepare(directory: Path) -> None:
    """Import and set up what all forks need."""
    import torch

    from fxshard import _compat

    beside.begin("hash Triton", _compat.hash_triton)
    _compat.import_inductor()
    _compat.hash_torch()
    import fxshard.backend  # noqa: F401  what defines the operators of ours that segments call

    if torch.cuda.device_count() > 0:
        given = dict(os.environ)
        os.environ["TRITON_CACHE_DIR"] = str(directory / "triton")
        from fxshard.first_kernel import compile_copy

        compile_copy(0)
        os.environ.clear()
        os.environ.update(given)
    beside.finish()


def serve(directory: Path) -> None:
    """One of the crew, from its fork to its end."""
    from fxshard import _compat

    _compat.start_kernel_processes()  # ahead of the files: forks would keep them open
    work(directory)
    _compat.stop_kernel_processes()


def work(directory: Path) -> None:
    """Do what the queue says until it is closed."""
    # Opened without waiting for the other side, which may be gone already; then nothing can be read or written.
    done = os.open(directory / "done", os.O_WRONLY | os.O_NONBLOCK)
    queue = os.open(directory / "queue", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(queue, True)
    os.write(done, HERE.to_bytes(NUMBER, "little"))
    while number := os.read(queue, NUMBER):
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
    sys.exit(in_one_piece(main, Path(sys.argv[1]), int(sys.argv[2])))
