"""The arena: one allocation that all programs share, and the last use of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from fxshard.plan.memory import SlotRange
from fxshard.runtime.streams import Token


class Arena:
    """Planned places for gathered buckets and gradient buckets.

    A place may be taken again when everything that was started on its bytes is over. The arena remembers those tokens,
    so nothing has to be recorded on streams and no program has to know what ran before it.
    """

    def __init__(self, device: torch.device, planned: bool = True) -> None:
        self._device = device
        self._planned = planned
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._in_use: list[tuple[SlotRange, Token]] = []
        self._views: dict[Hashable, tuple[Any, ...]] = {}
        self.allocations = 0

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
            self.allocations += 1

    def take(self, slot: SlotRange) -> tuple[torch.Tensor, list[Token]]:
        """The bytes of a slot, and what must be over before they are written."""
        if not self._planned:
            self.allocations += 1
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
