"""``fxshard.save``: every rank writes its rows, during training if asked to, and the first rank renames the folder."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from fxshard._torch.errors import CheckpointError, ConfigError, FxshardError, StateError
from fxshard._torch.progress import long_work
from fxshard._version import __version__
from fxshard.checkpoint import folder, groups
from fxshard.checkpoint.extra_state import modules_with_extra_state, random_states
from fxshard.checkpoint.held import Held, of_model, of_optimizer
from fxshard.checkpoint.partial import Partial, prepare
from fxshard.checkpoint.planners import Progress, SaveRows, packed
from fxshard.checkpoint.ranks import Ranks, ranks_of
from fxshard.frontend.module import ShardedModule
from fxshard.frontend.sharding import Sharding
from fxshard.optim.sharded import ShardedOptimizer

WRITERS = 2
"""Threads of a rank that write: while one waits for the disk, the other has torch pack the next tensor."""


class Save:
    """A save in progress. ``wait()`` returns when the checkpoint is complete, or raises what went wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._over = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is over, with or without success."""
        return self._over.is_set()

    def wait(self) -> Path:
        """Wait for the checkpoint, on this rank and all others; returns where it is."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self.path

    def _run(self, job: Any) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
            if threading.current_thread() is not threading.main_thread():  # wait() may come much later
                warnings.warn(f"an asynchronous save failed: {error}", RuntimeWarning, stacklevel=1)
        finally:
            self._over.set()


def save(
    model: ShardedModule,
    path: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    frozen: bool = True,
    asynchronous: bool = False,
    keep: int | None = None,
    progress: Progress | None = None,
) -> Save:
    """Save model, optimizer, random states and ``extra``: a folder that ``fxshard.load`` reads on any number of ranks.

    Collective. ``path`` appears when the checkpoint is complete, and not before; it must not exist.

    - ``optimizer``: one of ``torch.optim`` over ``model.parameters()``, where the model has none of its own.
    - ``extra``: this rank's own dictionary of numbers, strings, lists and tensors: LR scheduler, position in the data.
    - ``frozen``: off, parameters that do not train are left out, and ``load`` leaves those of the model as they are:
      checkpoints of adapters.
    - ``asynchronous``: copy the state to the host, return, and write during training; the next save waits, and so does
      ``.wait()`` on what is returned.
    - ``keep``: delete all but so many of the newest checkpoints in that folder.
    - ``progress``: called with (bytes done, bytes of this rank).

    >>> fxshard.save(model, f"runs/a/step-{step}", extra={"step": step, "scheduler": scheduler.state_dict()}, keep=3)
    """
    ranks = check_model(model)
    wait_for_save(model)
    path = Path(path)
    optimizer = model._optimizer if optimizer is None else optimizer
    problems: list[str] = []
    partial: Partial | None = None
    ranks.doing = f"saving {path}"
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ConfigError(f"keep={keep!r}: expected how many checkpoints to keep, 1 or more, or None for all")
    if Path(ranks.from_first(path)) != path:
        problems.append(f"this rank was given another path than rank 0: {path}")
    device = model._sharding.engine.device
    try:
        if ranks.rank == 0 and not problems:
            partial = prepare(path)
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.settle()
        held = [
            *of_model(model, ranks.parts, frozen=frozen),
            *(of_optimizer(model, optimizer.state, ranks.parts) if optimizer is not None else ()),
        ]
        record = _record(model, optimizer, ranks) | {"frozen": frozen}
        objects: dict[tuple[str, ...], bytes] = {("rng", str(ranks.rank)): packed(random_states(device))}
        objects["extra", str(ranks.rank)] = _packed_extra(extra)
        if ranks.rank == 0:
            objects["modules", "0"] = _packed_extra(_extra_states(model), "what get_extra_state() of modules returns")
    except FxshardError as error:
        problems.append(str(error))
    with _abandoned_on_failure(partial):
        ranks.settle(problems, "nothing was saved")
        into = ranks.from_first(partial.folder if partial is not None else None)
        if asynchronous:
            held = _STAGING.setdefault(model._sharding, _Staging()).copy(held)
    pending = Save(path)
    # Off the device torch copies ahead of what it writes, in one thread only.
    writers = 1 if device.type == "cuda" and not asynchronous else WRITERS

    def job() -> None:
        own = progress is not None or asynchronous  # during training nothing is shown
        with contextlib.nullcontext(progress) if own else long_work(f"saving {path.name}") as watch:
            with _abandoned_on_failure(partial):
                _write(path, into, SaveRows(held, objects, watch), ranks, writers)
                _commit(path, partial, ranks, record)
            if partial is not None and keep is not None:
                _prune(path, keep)

    if asynchronous:
        _PENDING[model._sharding] = pending
        threading.Thread(target=pending._run, args=(job,), name=f"fxshard save {path.name}").start()
    else:
        pending._run(job)
        pending.wait()
    return pending


def wait_for_save(model: ShardedModule) -> None:
    """Wait for an asynchronous save of this model that is still in progress; raises if it failed."""
    pending = _PENDING.pop(model._sharding, None)
    if pending is not None:
        pending.wait()


_PENDING: WeakKeyDictionary[Sharding, Save] = WeakKeyDictionary()
_STAGING: WeakKeyDictionary[Sharding, _Staging] = WeakKeyDictionary()


class _Staging:
    """Host memory for a copy of the state while it is written; kept for the next save, because pinning is slow."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def copy(self, held: Sequence[Held]) -> list[Held]:
        device = next((one.tensor.device for one in held if one.tensor.device.type == "cuda"), torch.device("cpu"))
        places, size = [], 0
        for one in held:
            places.append(size)
            size += -(-one.tensor.nbytes // 64) * 64
        if self._memory is None or self._memory.numel() < size:
            self._memory = None  # the old one goes first
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        staged = []
        for one, place in zip(held, places, strict=True):
            flat = self._memory[place : place + one.tensor.nbytes]
            copy = flat.view(one.tensor.dtype).view(one.tensor.shape)
            copy.copy_(one.now(), non_blocking=True)
            staged.append(replace(one, tensor=copy, deferred=None))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return staged


@contextlib.contextmanager
def _abandoned_on_failure(partial: Partial | None) -> Iterator[None]:
    """Remove what was written if the save fails; only the first rank has it."""
    try:
        yield
    except BaseException:
        if partial is not None:
            partial.abandon()
        raise


def _write(path: Path, into: Path, planner: SaveRows, ranks: Ranks, writers: int) -> None:
    writer = dcp.FileSystemWriter(into, thread_count=writers)
    try:
        with quiet(ranks), ranks.together():
            dcp.save({}, storage_writer=writer, planner=planner, process_group=ranks.group, no_dist=ranks.group is None)
    except CheckpointException as error:
        raise CheckpointError(f"{path} was not saved: {explained(error)}") from error


def _commit(path: Path, partial: Partial | None, ranks: Ranks, record: dict[str, Any]) -> None:
    problems = []
    if partial is not None:
        try:
            partial.commit(record)
        except OSError as error:
            problems.append(str(error))
    ranks.settle(problems, f"{path} was not saved")


def _prune(path: Path, keep: int) -> None:
    try:
        folder.prune(path, keep)
    except OSError as error:  # the new checkpoint is complete: nothing to fail for
        warnings.warn(f"an old checkpoint could not be deleted: {error}", RuntimeWarning, stacklevel=1)


def _extra_states(model: ShardedModule) -> dict[str, Any]:
    return {name: module.get_extra_state() for name, module in modules_with_extra_state(model._inner).items()}


def _packed_extra(extra: Any, what: str = "extra") -> bytes:
    try:
        return packed(extra)
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be saved: give dictionaries, lists, numbers, strings and tensors ({error})"
        ) from error


def _record(model: ShardedModule, optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> dict[str, Any]:
    sharding = model._sharding
    try:
        digest = model.schedule.digest
    except StateError:  # not called yet
        digest = None
    return {
        "fxshard": __version__,
        "torch": torch.__version__,
        "saved_at": time.time(),
        "ranks": ranks.size,
        "shards": sharding.channels.domain.shards,
        "zero": sharding.zero,
        "schedule": digest,
        "optimizer": groups.describe(model, optimizer) if optimizer is not None else None,
    }


def check_model(model: object) -> Ranks:
    """The ranks of a model, if it is one of ours."""
    if not isinstance(model, ShardedModule):
        raise ConfigError(
            f"expected a model that fxshard.compile or fxshard.shard made, got {type(model).__name__}; a plain module "
            "is saved by torch.save or torch.distributed.checkpoint"
        )
    if model._unsharded is not None:
        model._unsharded.refuse("saving or loading")
    return ranks_of(model._sharding)


@contextlib.contextmanager
def quiet(ranks: Ranks) -> Iterator[None]:
    """torch warns when there is no process group; here that is as it should be."""
    if ranks.group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def explained(error: CheckpointException) -> str:
    """The causes that ranks gave, without the tracebacks."""
    causes = {f"{cause[0]}" or type(cause[0]).__name__: rank for rank, cause in error.failures.items()}
    return "; ".join(f"{cause} (rank {rank})" for cause, rank in causes.items())
