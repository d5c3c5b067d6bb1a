"""Collectives that fail or do not finish: which event of the schedule it is, and on which rank."""

from __future__ import annotations

import collections
import contextlib
import datetime
import threading
import time
import weakref
from collections.abc import Iterator

import torch

from fxshard._torch.errors import PeerError
from fxshard._torch.log import LOG
from fxshard.runtime.streams import Token

PATIENCE = 60.0
"""Seconds after which a collective that has not finished is reported, unless the process group gives up earlier."""


@contextlib.contextmanager
def failing(event: str, rank: int) -> Iterator[None]:
    """Name the event when its collective fails."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerError(
            f"rank {rank}: {event} failed: another rank ended, raised, or did not come this far within the timeout of "
            f"the process group ({error})"
        ) from error


@contextlib.contextmanager
def waiting(call: str, rank: int, timeout: datetime.timedelta) -> Iterator[None]:
    """Wait for the other ranks at a call that all of them have to make, and say so if they do not come."""
    patience = min(PATIENCE, timeout.total_seconds() / 2)
    message = (
        "rank %d has waited at %s for %.0f s: it is collective, so every rank has to call it, also those that write "
        "nothing. Call it outside of `if rank == 0:`"
    )
    timer = threading.Timer(patience, LOG.error, (message, rank, call, patience))
    timer.daemon = True
    timer.start()
    try:
        with failing(call, rank):
            yield
    finally:
        timer.cancel()


class Watched:
    """A started collective that knows which event it belongs to."""

    def __init__(self, token: Token, event: str, rank: int) -> None:
        self._token = token
        self.event = event
        self.rank = rank
        self.started = time.monotonic()

    def wait(self) -> None:
        with failing(self.event, self.rank):
            self._token.wait()

    def done(self) -> bool:
        return self._token.done()


class Watchdog:
    """Looks at collectives from a thread of its own and logs, once each, those that take too long."""

    def __init__(self, rank: int, timeout: datetime.timedelta) -> None:
        self.rank = rank
        self.patience = min(PATIENCE, timeout.total_seconds() / 2)
        self._pending: collections.deque[Watched] = collections.deque()
        self._thread: threading.Thread | None = None

    def watch(self, token: Token, event: str) -> Watched:
        watched = Watched(token, event, self.rank)
        self._pending.append(watched)
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(weakref.ref(self),), daemon=True)
            self._thread.start()
        return watched

    def look(self) -> None:
        """Forget what is done, report the oldest of what is late: what was started after it waits for it."""
        while self._pending and self._pending[0].done():
            self._pending.popleft()
        if self._pending and time.monotonic() - self._pending[0].started > self.patience:
            late = self._pending.popleft()
            LOG.error(
                "rank %d: %s has not finished for %.0f s; %d more collectives wait for it. Look at what the other "
                "ranks do: one of them has ended, is stuck, or runs another program",
                late.rank,
                late.event,
                time.monotonic() - late.started,
                len(self._pending),
            )


def _run(watchdog: weakref.ref[Watchdog]) -> None:
    """Until the watchdog's model is gone."""
    while (alive := watchdog()) is not None:
        alive.look()
        pause = min(1.0, alive.patience / 4)
        del alive
        time.sleep(pause)
