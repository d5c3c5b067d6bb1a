"""Optimizer state in the host's memory, brought to the GPU piece by piece, updated there and brought back.

Copies in both directions run on streams of their own, during the updates: while a piece is updated the next comes in
and the one before goes out. Pieces have few places on the device, which they take in turn, so a host that is ahead of
the device does not fill its memory. On a CPU there is nothing to overlap: the same copies, one after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from fxshard.optim.packed import Stored
from fxshard.planner.layout import aligned
from fxshard.planner.state import PLACES

IN_FLIGHT = 2
"""Batches of whole matrices that may be on their way back before the host waits for the oldest."""
Piece = Sequence[Stored]
"""The moments of some rows, which are copied together."""


@dataclass
class _Place:
    """Memory on the device that pieces take in turn."""

    memory: torch.Tensor
    free: torch.cuda.Event | None = None
    """Until when the piece before is on its way out."""


class Transfers:
    """Copies of state between the host and one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._in = torch.cuda.Stream(device) if on_gpu else None
        self._out = torch.cuda.Stream(device) if on_gpu else None
        self._written: dict[int, torch.cuda.Event] = {}
        """When what the host holds at an address is up to date."""
        self._batches: deque[torch.cuda.Event] = deque()
        self._largest = 0
        self._places: deque[_Place] = deque()

    def reserve(self, piece: Piece) -> None:
        """A piece as large as this one may come."""
        self._largest = max(self._largest, _bytes(piece))

    def streamed(self, pieces: Sequence[Piece]) -> Iterator[list[Stored]]:
        """Each piece on the device, in turn, ready for the current stream. What is done to one before the next is
        asked for is what the host gets back.
        """
        coming: deque[tuple[Piece, _Place, list[Stored], torch.cuda.Event | None]] = deque()
        waiting = deque(pieces)
        while waiting or coming:
            while waiting and len(coming) < PLACES - 1:
                piece, place = waiting.popleft(), self._next_place()
                here = _laid_out(piece, place.memory)
                coming.append((piece, place, here, self._bring(piece, here, place.free)))
            piece, place, here, ready = coming.popleft()
            if ready is not None:
                torch.cuda.current_stream(self._device).wait_event(ready)
            yield here
            place.free = self._take_back(piece, here)

    def _next_place(self) -> _Place:
        """The places, each in turn; what they had before may still be on its way out."""
        if not self._places:
            for _ in range(PLACES):
                memory = torch.empty(self._largest, dtype=torch.uint8, device=self._device)
                self._places.append(_Place(memory))
            if self._in is not None:  # the memory may be in use by what this stream was given before
                self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._places.rotate(-1)
        return self._places[-1]

    def end_step(self) -> None:
        """Give the places back to the device. Not before: a host that is ahead would take others for each bucket."""
        while self._places:
            self._still_used(self._places.pop().memory)

    def bring(self, piece: Piece) -> list[Stored]:
        """A piece on the device, in memory of its own, ready for the current stream."""
        here = self.room(piece)
        if self._in is not None:
            self._in.wait_stream(torch.cuda.current_stream(self._device))
        ready = self._bring(piece, here, None)
        if ready is not None:
            torch.cuda.current_stream(self._device).wait_event(ready)
        return here

    def room(self, piece: Piece) -> list[Stored]:
        """Memory on the device for a piece, with nothing in it yet."""
        return [
            one.holding(*(torch.empty(t.shape, dtype=t.dtype, device=self._device) for t in one.tensors))
            for one in piece
        ]

    def take_back(self, piece: Piece, here: Sequence[Stored]) -> None:
        """Copy what ``bring`` gave, and was changed since, to the host."""
        self._take_back(piece, here)
        for one in here:
            for tensor in one.tensors:
                self._still_used(tensor)

    def end_batch(self) -> None:
        """Let no more batches of ``take_back`` wait for the device than may take its memory meanwhile."""
        if self._out is not None:
            self._batches.append(self._out.record_event())
            if len(self._batches) > IN_FLIGHT:
                self._batches.popleft().synchronize()

    def finish(self) -> None:
        """Wait until the host has everything."""
        if self._out is not None:
            self._out.synchronize()

    def _bring(self, piece: Piece, here: Sequence[Stored], free: torch.cuda.Event | None) -> torch.cuda.Event | None:
        if self._in is not None:
            known = [self._written.get(one.values.data_ptr()) for one in piece]
            for event in (free, *known):
                if event is not None:
                    self._in.wait_event(event)
        return self._copy(self._in, here, piece)

    def _take_back(self, piece: Piece, here: Sequence[Stored]) -> torch.cuda.Event | None:
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._device))
        done = self._copy(self._out, piece, here)
        if done is not None:
            self._written.update({one.values.data_ptr(): done for one in piece})
        return done

    def _copy(self, stream: torch.cuda.Stream | None, to: Piece, source: Piece) -> torch.cuda.Event | None:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for one, other in zip(to, source, strict=True):
                for target, tensor in zip(one.tensors, other.tensors, strict=True):
                    target.copy_(tensor, non_blocking=True)
        return stream.record_event() if stream is not None else None

    def _still_used(self, tensor: torch.Tensor) -> None:
        for stream in (self._in, self._out):
            if stream is not None:
                tensor.record_stream(stream)


def _bytes(piece: Piece) -> int:
    return sum(aligned(tensor.nbytes) for one in piece for tensor in one.tensors)


def _laid_out(piece: Piece, memory: torch.Tensor) -> list[Stored]:
    """A piece laid out in some memory of the device, one tensor after another."""
    here, at = [], 0
    for one in piece:
        tensors = []
        for tensor in one.tensors:
            tensors.append(memory[at : at + tensor.nbytes].view(tensor.dtype))
            at += aligned(tensor.nbytes)
        here.append(one.holding(*tensors))
    return here
