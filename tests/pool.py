"""Worker processes that run functions as the ranks of a gloo process group. They are started once, by forking a process
that has imported what they need.

    results = ranks(2, fn, *args, **kwargs)      # `ranks` is the fixture of this pool

runs `fn(*args, **kwargs)` on two ranks, each inside a default process group made for this call, and returns what they
returned, by rank. `fn` travels by name, so it is a function at the top of a test module.

One call is a short conversation with each worker, which is either idle or in a call:

    pool → worker    a job
    worker → pool    its outcome: a value, or an error
    pool → worker    release, once every rank has answered: no group closes while a peer may still be using it
    worker → pool    idle, with nothing left of the call

A rank that failed closes its group before the release, so that peers waiting for it fail too instead of waiting. One
that could not even join a group, because a peer died meanwhile, ends, and is replaced.
"""

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

MOST_RANKS = 4
START_SECONDS = 120.0
IDLE, RELEASE = b"idle", b"release"
RECORDED = 100
"""Collectives that torch's flight recorder remembers in a worker: 2000 elsewhere, more than most tests make."""


@dataclass(frozen=True)
class Job:
    """What one rank is to do."""

    call: bytes  # pickled (fn, args, kwargs)
    rank: int
    ranks: int
    store: str
    timeout: float


@dataclass(frozen=True)
class Value:
    """A rank returned; `pickled` holds tensors by value, so that they outlive the worker."""

    pickled: bytes


@dataclass(frozen=True)
class Failure:
    """A rank did not return."""

    type: str
    text: str


class RankError(RuntimeError):
    """Some ranks failed. `errors` has the traceback text and `types` the class name of the exception, by rank."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        failures = dict(sorted(failures.items()))
        self.errors = {rank: failure.text for rank, failure in failures.items()}
        self.types = {rank: failure.type for rank, failure in failures.items()}
        super().__init__(
            "\n".join(f"rank {rank}: {failure.type}\n{failure.text}" for rank, failure in failures.items())
        )


class RankTimeout(TimeoutError):
    """No rank failed, but the ranks in `stacks` did not finish in time; `stacks` says where each of them was."""

    def __init__(self, seconds: float, stacks: dict[int, str]) -> None:
        self.stacks = stacks
        names = ", ".join(str(rank) for rank in sorted(stacks))
        where = "\n".join(f"rank {rank} was at\n{stacks[rank]}" for rank in sorted(stacks))
        super().__init__(f"ranks {names} did not finish in {seconds:g} s\n{where}")


class Pool:
    """Up to four workers, started when first needed and replaced when they die, hang or cannot be cleaned."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = 0

    def __call__(
        self, n: int, fn: Callable[..., T], /, *args: Any, timeout: float = 240.0, grace: float = 10.0, **kwargs: Any
    ) -> list[T]:
        """Run `fn(*args, **kwargs)` on ranks 0..n-1 and return the results by rank.

        Raises `RankError` if a rank fails; the others then have `grace` seconds to finish or fail. Raises
        `RankTimeout` if none fails and some are not done after `timeout` seconds.
        """
        if not 1 <= n <= MOST_RANKS:
            raise ValueError(f"{n} ranks asked for; the pool runs 1 to {MOST_RANKS}")
        call = pickle.dumps((fn, args, kwargs))
        workers = self._ready(n)
        self._calls += 1
        store = str(Path(self._folder.name, f"store{self._calls}"))
        try:
            for rank, worker in enumerate(workers):
                worker.send(pickle.dumps(Job(call, rank, n, store, timeout)))
            outcomes = _outcomes(workers, time.monotonic() + timeout, grace)
            stacks = _stop([worker for rank, worker in enumerate(workers) if rank not in outcomes])
            _release([worker for rank, worker in enumerate(workers) if rank in outcomes], grace)
        except BaseException:  # interrupted in the middle of a call, by the keyboard or the time limit of the test
            _stop(workers)
            raise
        late = {rank: stacks[worker] for rank, worker in enumerate(workers) if worker in stacks}
        failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
        if failures:
            for rank, stack in late.items():
                failures[rank] = Failure("Unfinished", f"still running after the first failure, at\n{stack}")
            raise RankError(failures)
        if late:
            raise RankTimeout(timeout, late)
        values = {
            rank: pickle.loads(outcome.pickled) for rank, outcome in outcomes.items() if isinstance(outcome, Value)
        }
        return [values[rank] for rank in range(n)]

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ready(self, n: int) -> list["_Worker"]:
        """The first `n` living workers, idle; all that are missing start at once."""
        self._workers = [worker for worker in self._workers if worker.alive()]
        new = [_Worker(Path(self._folder.name)) for _ in range(n - len(self._workers))]
        self._workers += new
        deadline = time.monotonic() + START_SECONDS
        try:
            if not all(worker.idle_by(deadline) for worker in new):
                raise RuntimeError("a worker process did not start; its output says why")
        except BaseException:
            _stop(new)
            raise
        return self._workers[:n]


def forget() -> None:
    """Drop what one test can leave to the next inside torch: the seed, what Dynamo compiled, and meshes of groups that
    are closed. Results of operations on DTensors have the mesh of an earlier equal operation, if torch remembers one.
    """
    torch.manual_seed(0)
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        for clear in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
            getattr(debug, clear, lambda: None)()  # of which older versions have one, or none
    if "torch._dynamo" in sys.modules:  # importing it costs seconds: not for the sake of resetting it
        torch._dynamo.reset()
        torch._dynamo.config.run_gc_after_compile = False


class _Worker:
    """One worker process, seen from the pool."""

    def __init__(self, folder: Path) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        handle, name = tempfile.mkstemp(prefix="stack-", dir=folder)
        os.close(handle)
        self._stack = Path(name)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name), daemon=True)
        self.process.start()
        theirs.close()  # or the end of the worker would not be the end of the pipe

    def alive(self) -> bool:
        return self.process.is_alive()

    def send(self, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # a dead worker is noticed when its answer is read
            self.pipe.send_bytes(message)

    def receive(self) -> Value | Failure:
        """The outcome of the job; call only when the pipe has something to say, be it that it closed."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(timeout=5)
            self.kill()
            return Failure("WorkerDied", f"the worker process ended with exit code {self.process.exitcode}")

    def idle_by(self, deadline: float) -> bool:
        """Whether the worker says before `deadline` that it is idle."""
        try:
            return self.pipe.poll(max(0.0, deadline - time.monotonic())) and self.pipe.recv_bytes() == IDLE
        except (EOFError, OSError):
            return False

    def ask_stack(self) -> None:
        """Let the worker write where it is, even if it is stuck outside Python."""
        if self.alive() and self.process.pid:
            os.kill(self.process.pid, signal.SIGUSR1)

    def stack(self) -> str:
        return self._stack.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _outcomes(workers: list[_Worker], deadline: float, grace: float) -> dict[int, Value | Failure]:
    """What the ranks answer before the deadline, which the first failure brings nearer."""
    rank_of: dict[Connection, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
    outcomes: dict[int, Value | Failure] = {}
    while rank_of and (ready := wait(list(rank_of), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = rank_of.pop(pipe)
            outcomes[rank] = workers[rank].receive()
            if isinstance(outcomes[rank], Failure):
                deadline = min(deadline, time.monotonic() + grace)
    return outcomes


def _release(workers: Iterable[_Worker], grace: float) -> None:
    """Bring the workers back to idle; those that cannot be are killed, and replaced when next needed."""
    workers = [worker for worker in workers if worker.alive()]
    for worker in workers:
        worker.send(RELEASE)
    deadline = time.monotonic() + grace
    for worker in workers:
        if not worker.idle_by(deadline):
            worker.kill()


def _stop(workers: list[_Worker]) -> dict[_Worker, str]:
    """Kill the workers; say where each of them was."""
    for worker in workers:
        worker.ask_stack()
    if workers:
        time.sleep(0.2)  # for the stacks to be written
    for worker in workers:
        worker.kill()
    return {worker: worker.stack() for worker in workers}


def _serve(pipe: Connection, stack: str) -> None:
    """The life of a worker process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not every machine can resolve its own name
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as in `tests.preload`, which may not have been found
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
    faulthandler.register(signal.SIGUSR1, file=open(stack, "w"))  # noqa: SIM115 - open for life
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keyboard interrupts the pool, which ends the workers
    torch.set_num_threads(1)
    try:
        while True:
            forget()
            gc.collect()
            pipe.send_bytes(IDLE)
            outcome = _work(pickle.loads(pipe.recv_bytes()))
            pipe.send_bytes(pickle.dumps(outcome))
            if isinstance(outcome, Failure):
                if not dist.is_initialized():
                    return  # torch counts a group that was never joined, and would look for peers under another name
                _leave_group()
            assert pipe.recv_bytes() == RELEASE
            _leave_group()
    except (EOFError, OSError):
        os._exit(0)  # the pool is gone; nothing here is worth an orderly end


def _work(job: Job) -> Value | Failure:
    """Do the job in a process group of its own, which stays open."""
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(job.store, job.ranks),
            rank=job.rank,
            world_size=job.ranks,
            timeout=timedelta(seconds=job.timeout + 60),  # the pool is to notice first, and to say who is late
        )
        dist.barrier()  # a rank that failed now would close connections that its peers are still making
        fn, args, kwargs = pickle.loads(job.call)
        return Value(pickle.dumps(fn(*args, **kwargs)))
    except BaseException as error:  # sys.exit included: the worker goes on living
        return Failure(type(error).__name__, traceback.format_exc())


def _leave_group() -> None:
    """Close the process group, and with it the connections to the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
