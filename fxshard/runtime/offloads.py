"""Saved activations on their way to the host and back, on a stream of their own.

Each forward has the host's memory of its activations to itself, until autograd has let go of all that it saved: several
forwards may wait for their backwards. Then the next forward takes that memory: it is allocated once. Captured forwards,
of which at most one has activations at any time, share memory that no other takes. Copies in both directions are on one
stream, so none overtakes another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fxshard.runtime.frame import Frame
from fxshard.runtime.home import Home
from fxshard.runtime.host_memory import host_memory
from fxshard.runtime.streams import Token
from fxshard.schedule.events import Event

STREAM = "host"


@dataclass(frozen=True)
class Coming:
    """An activation that is copied back. What it is copied from stays until it is there."""

    value: torch.Tensor
    copy: torch.Tensor
    token: Token


class Offloads:
    """Copies between the device and the host. Called by programs only, in the order of the schedule."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._places: list[Home] = []
        self._for_captures: list[torch.Tensor] = []
        self._lent: torch.Tensor | None = None
        """The host's memory of the forward that runs."""
        self._leaving: dict[int, Token] = {}

    @property
    def bytes(self) -> int:
        """What it has taken of the host's memory."""
        return sum(memory.nbytes for memory in (*self._for_captures, *(place.memory for place in self._places)))

    def reserve(self, size: int) -> None:
        """Have memory for a forward that is going to be captured: none can be had meanwhile."""
        if not any(memory.nbytes >= size for memory in self._for_captures):
            place = self._place(size)
            self._places.remove(place)
            self._for_captures.append(place.memory)

    def offload(self, values: list[Any], event: Event, size: int) -> tuple[torch.Tensor]:
        """Start copying a value to its place among ``size`` bytes; gives the copy."""
        value: torch.Tensor = values.pop()
        if event.number == 0:
            self._lent = self._lend(size)
        assert self._lent is not None and event.slot is not None
        lying = self._lent[event.slot.offset : event.slot.end].view(value.dtype)
        self._leaving[event.number] = self._copy(lying, _flat(value))
        return (lying.as_strided(value.shape, value.stride()),)

    def release(self, values: list[Any], event: Event) -> None:
        """What is computed from now on may take the memory of a value: its copy is over."""
        self._leaving.pop(event.number).wait()
        values.clear()

    def reload(self, values: list[Any]) -> tuple[Coming]:
        """Start copying a value back."""
        copy: torch.Tensor = values.pop()
        value = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device=self._frame.device)
        return (Coming(value, copy, self._copy(_flat(value), _flat(copy))),)

    def restore(self, values: list[Any]) -> tuple[torch.Tensor]:
        """The value, for what is computed from now on."""
        coming: Coming = values.pop()
        coming.token.wait()
        return (coming.value,)

    def abort(self) -> None:
        """A program failed: what it wanted to offload stays until it is copied."""
        while self._leaving:
            self._leaving.popitem()[1].wait()
        self._lent = None

    def forget(self) -> None:
        """What was started did not run: there is nothing to wait for."""
        self._leaving.clear()
        self._lent = None

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        streams = self._frame.streams

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        # What is copied is computed by then, and so is all that read the memory to which it is copied.
        return self._frame.launched(streams.launch(STREAM, None, before=copy, after=[streams.mark()]))

    def _lend(self, size: int) -> torch.Tensor:
        self._lent = None
        if self._frame.capturing:
            return next(memory for memory in self._for_captures if memory.nbytes >= size)
        lent = self._place(size).lend()
        assert lent is not None
        return lent

    def _place(self, size: int) -> Home:
        """The smallest that is free and large enough, or a new one."""
        fitting = [place for place in self._places if place.free and place.memory.nbytes >= size]
        place = min(fitting, key=lambda each: each.memory.nbytes, default=None)
        if place is None:
            instead = 'compute more of it again (activations="recompute")'
            place = Home(host_memory(size, self._frame.device, "offloaded activations", instead))
            self._places.append(place)
        return place


def _flat(value: torch.Tensor) -> torch.Tensor:
    """A tensor that fills its memory, as it lies there."""
    return value.as_strided((value.numel(),), (1,))
