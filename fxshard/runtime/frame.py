"""What gathers and reductions run in: memory (the arena), streams, options, and the watchdog of collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fxshard._torch import private
from fxshard.passes.options import Options
from fxshard.planner.memory import SlotRange
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.streams import Token, streams_for
from fxshard.runtime.watchdog import Watchdog, failing
from fxshard.schedule.events import Kind, Phase


class Arena:
    """Planned places for gathered buckets and gradient buckets.

    A place may be taken again when everything that was started on its bytes is over. The arena remembers those tokens,
    so nothing has to be recorded on streams and no program has to know what ran before it.
    """

    def __init__(self, device: torch.device, planned: bool) -> None:
        self._device = device
        self._planned = planned
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._in_use: list[tuple[SlotRange, Token]] = []
        self._views: dict[Hashable, tuple[Any, ...]] = {}

    @property
    def bytes(self) -> int:
        return self._memory.numel()

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    @property
    def planned(self) -> bool:
        return self._planned

    def reserve(self, size: int) -> None:
        """Make room for a program. Only between programs: addresses change."""
        if self._planned and size > self.bytes:
            self.wait()
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._views.clear()

    def take(self, slot: SlotRange) -> tuple[torch.Tensor, list[Token]]:
        """The bytes of a slot, and what must be over before they are written."""
        if not self._planned:
            return torch.empty(slot.bytes, dtype=torch.uint8, device=self._device), []
        pending = [token for used, token in self._in_use if used.overlaps(slot)]
        self._in_use = [(used, token) for used, token in self._in_use if not _inside(used, slot)]
        return self._memory[slot.offset : slot.end], pending

    def release(self, slot: SlotRange, when: Token) -> None:
        """The slot is free once ``when`` is over."""
        if self._planned:
            self._in_use.append((slot, when))

    def views(self, key: Hashable, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Views of a planned place: made once, since the place does not move."""
        if not self._planned:
            return make()
        if key not in self._views:
            self._views[key] = make()
        return self._views[key]

    def occupy(self, until: Token) -> None:
        """All of it is in use until then, whatever was in use before."""
        self._in_use = [(SlotRange(0, self.bytes), until)] if self.bytes else []

    def wait(self) -> None:
        """Order what comes next after every pending use."""
        for _, token in self._in_use:
            token.wait()
        self._in_use.clear()


def _inside(inner: SlotRange, outer: SlotRange) -> bool:
    return outer.offset <= inner.offset and inner.end <= outer.end


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
