"""What gathers and reductions run in: memory, streams, options, and the watchdog of collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from fxshard._torch import private
from fxshard.passes.options import Options
from fxshard.runtime.arena import Arena
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.streams import Token, streams_for
from fxshard.runtime.watchdog import Watchdog, failing
from fxshard.schedule.events import Kind, Phase


class Frame:
    """Shared by everything that moves the buckets of one model."""

    def __init__(self, buckets: list[Bucket], device: torch.device, options: Options) -> None:
        self.buckets = buckets
        self.device = device
        self.options = options
        self.arena = Arena(device, planned=options.debug.arena)
        self.streams = streams_for(device)
        self.phase: Phase | None = None
        self.capturing = False
        """Whether what is started now is captured: it runs later, so the watchdog cannot watch it."""
        self._watchdog: Watchdog | None = None
        if any(bucket.channels.domain.ranks > 1 or bucket.tensor is not None for bucket in buckets):
            self._watchdog = Watchdog(dist.get_rank(), private.group_timeout())

    def launched(self, token: Token) -> Token:
        """What was started, waited for at once where nothing is to run during compute."""
        if not self.options.debug.overlap:
            token.wait()
        return token

    def watch(self, token: Token, what: str) -> None:
        """Say what it is when something that was started does not end."""
        if self._watchdog is not None:
            self._watchdog.watch(token, what)

    @contextlib.contextmanager
    def naming(self, kind: Kind, bucket: Bucket) -> Iterator[Callable[[Token], Token]]:
        """Say which event it is when starting a collective fails, or when what was started fails or does not end."""
        event = f"{self.phase or 'eager'} {kind} of {bucket.plan.name!r}"
        watchdog = self._watchdog
        if watchdog is None or self.capturing:
            yield lambda token: token
            return
        with failing(event, watchdog.rank):
            yield lambda token: watchdog.watch(token, event)
