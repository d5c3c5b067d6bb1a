"""A crew of processes that compile what this one will want: segments and kernels.

What they compile goes into caches on disk, where this process finds it: whatever becomes of them, nothing but time
depends on it. A job is a pickled function. Each takes jobs from one queue, a FIFO in which a job is its number, and
whoever reads a number does that job. Numbers of finished jobs come back through another FIFO. A few more processes
have a queue of their own, for kernels that need neither Inductor nor a device, and are there seconds earlier.

Nothing here imports torch: the processes take seconds to start, and start first.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from fxshard.errors import ConfigError
from fxshard.log import LOG

VARIABLE = "FXSHARD_HELPERS"
MOST = 8
CORES_EACH = 2
KERNELS_EACH = 3
"""Processes in which each compiles the kernels that it writes."""
QUEUE, KERNELS, DONE = "queue", "kernels", "done"
"""FIFOs: jobs for anybody, kernels, and what is done."""
NUMBER = 4
"""Bytes of a job's number."""
HERE = 2 ** (8 * NUMBER) - 1
"""What each of the crew says when it is ready."""
PATIENCE = 1000
"""Milliseconds between looks at whether the crew is still there."""
SILENCE = 90
"""Seconds after which a crew that is there is not waited for any more."""


def wanted() -> int:
    """How many processes to start: what ``FXSHARD_HELPERS`` says, or as many as this rank's cores allow."""
    asked = os.environ.get(VARIABLE)
    if asked:
        if not asked.isdecimal():
            raise ConfigError(f"{VARIABLE}={asked}: it is the number of processes that compile ahead, 0 for none")
        return int(asked)
    count = min(len(os.sched_getaffinity(0)) // _ranks_here() // CORES_EACH, MOST)
    return count if count > 1 else 0


def _ranks_here() -> int:
    """How many processes share this machine's cores: what torchrun says, or all ranks if they know of each other."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    dist = sys.modules.get("torch.distributed")
    return int(dist.get_world_size()) if dist is not None and dist.is_available() and dist.is_initialized() else 1


class Crew:
    """Processes that wait for jobs. They end with this one, or when they are dismissed."""

    def __init__(
        self, count: int, device: int | None = None, command: Sequence[str] = ("-m", "fxshard.helpers.member")
    ) -> None:
        """``device``: the number of the GPU that they will compile for, where it is known and in use already."""
        self.count = count
        self.finished = 0
        """How many jobs they have done."""
        self.open: set[int] = set()
        """Wanted jobs that are not done."""
        self._unwanted: set[int] = set()
        self._made = 0
        self._present = 0
        self._heard = 0.0
        self._dismissed = False
        self._directory = Path(tempfile.mkdtemp(prefix="fxshard-"))
        for name in (QUEUE, KERNELS, DONE):
            os.mkfifo(self._directory / name)
        self._queues = {name: os.open(self._directory / name, os.O_RDWR | os.O_NONBLOCK) for name in (QUEUE, KERNELS)}
        self._done = os.open(self._directory / DONE, os.O_RDONLY | os.O_NONBLOCK)
        self._news = select.poll()
        self._news.register(self._done, select.POLLIN)
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, *command, str(self._directory), str(count), "" if device is None else str(device)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                VARIABLE: "0",
                "TORCH_WARM_POOL": "0",
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # no process forked from one that asks CUDA itself could use it
                # Kernels are compiled in forks of each process: they are there at once.
                "TORCHINDUCTOR_WORKER_START": "fork",
                "TORCHINDUCTOR_COMPILE_THREADS": str(KERNELS_EACH),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if LOG.isEnabledFor(10) else subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.dismiss)

    def publish(self, job: Callable[[], object], *, wanted: bool = True, queue: str = QUEUE) -> int:
        """Hand out work; its number. What is not ``wanted`` is for the crew's own good, and nobody waits for it."""
        number = self._made
        self._made += 1
        try:
            (self._directory / f"{number}.job").write_bytes(pickle.dumps(job))
        except OSError as error:  # a full disk, for one
            LOG.debug("something cannot be compiled ahead: %s", error)
            return number
        (self.open if wanted else self._unwanted).add(number)
        os.write(self._queues[queue], number.to_bytes(NUMBER, "little"))
        return number

    def withdraw(self, number: int) -> None:
        """Nobody need begin a job any more, nor wait for it."""
        self.open.discard(number)
        (self._directory / f"{number}.job").unlink(missing_ok=True)

    def withdraw_unwanted(self) -> None:
        """Now there is work that is wanted."""
        while self._unwanted:
            self.withdraw(self._unwanted.pop())

    def present(self) -> int:
        """How many of the crew are ready to work. What they have to say is listened to."""
        while self._hear(0):
            pass
        return self._present

    def finish(self, *, but: Collection[int] = ()) -> None:
        """Return when all wanted jobs are done, or nobody is there who could do them, or says anything any more.

        ``but``: jobs that are not waited for yet.
        """
        self._heard = time.monotonic()
        while self.present() and self.open.difference(but):
            self._hear(PATIENCE)
            if time.monotonic() - self._heard > SILENCE:
                LOG.warning("processes that compile ahead have said nothing for %d s; going on without them", SILENCE)
                return

    def _hear(self, milliseconds: int) -> bool:
        """Wait for news and note them; whether there were any."""
        events = self._news.poll(milliseconds)
        if any(event & select.POLLIN for _, event in events):
            self._note(int.from_bytes(os.read(self._done, NUMBER), "little"))
            return True
        if events or self._process.poll() is not None:
            if self._present and self.open:
                LOG.debug("processes that compile ahead ended before their work was done")
            self._present = 0
        return False

    def _note(self, number: int) -> None:
        self._heard = time.monotonic()
        if number == HERE:
            self._present += 1
            return
        failed = self._directory / f"{number}.error"
        if failed.exists():
            LOG.debug("something could not be compiled ahead: %s", failed.read_text())
        else:
            self.finished += 1
        self.open.discard(number)

    def dismiss(self) -> None:
        """End the processes at once: what they have finished is on disk, and nothing else is worth anything."""
        if self._owner != os.getpid() or self._dismissed:
            return
        self._dismissed = True
        atexit.unregister(self.dismiss)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Neither say nor hear anything any more."""
        for descriptor in (*self._queues.values(), self._done):
            os.close(descriptor)


_hired: list[Crew] = []
"""The crew of this process, until its first graphs are compiled."""
_started: list[int] = []
"""The processes that have had one: a second model compiles by itself."""


def hire(device: int | None = None) -> None:
    """Start a crew, once in a process, and wait for nothing. ``device``: as of :class:`Crew`."""
    count = wanted() if os.getpid() not in _started else 0
    if count > 0:
        if not _started:
            os.register_at_fork(after_in_child=_forget)
        _started.append(os.getpid())
        _hired.append(Crew(count, device))


def _forget() -> None:
    """A process that was forked from the owner has no crew, and keeps nobody from noticing that the owner is gone."""
    while _hired:
        _hired.pop().close()


def hired() -> Crew | None:
    """The crew, if there is one and this is its process."""
    return _hired[-1] if _hired and _started[-1:] == [os.getpid()] else None


def dismiss(whom: Crew | None = None) -> None:
    """Let the crew go, if there is one (if it is still ``whom``): nobody else waits for it."""
    while _hired and whom in (None, _hired[-1]):
        _hired.pop().dismiss()
