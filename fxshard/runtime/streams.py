"""Things that happen later: collectives during compute, on CUDA streams or as gloo work on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist

from fxshard.schedule.events import TENSOR


class Token(Protocol):
    """Something that was started. Waiting twice is harmless."""

    def wait(self) -> None:
        """Order what the caller does next after it: on CUDA the current stream waits, on the CPU the caller."""

    def done(self) -> bool:
        """Whether it is over, without waiting."""


class AllOf:
    """Several collectives that are waited for as one."""

    def __init__(self, works: list[dist.Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()

    def is_completed(self) -> bool:
        return all(work is None or work.is_completed() for work in self._works)


class CpuToken:
    """A gloo collective, and what is left to do when it is over."""

    def __init__(self, work: dist.Work | AllOf | None, then: Callable[[], None] | None) -> None:
        self._work, self._then = work, then

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None  # not before: until then a watchdog asks whether it is done
        then, self._then = self._then, None
        if then is not None:
            then()

    def done(self) -> bool:
        work = self._work
        return work is None or work.is_completed()


class CudaToken:
    """A point on a CUDA stream."""

    def __init__(self, event: torch.cuda.Event, device: int | None) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def done(self) -> bool:
        return self._event.query()


Collective = Callable[[bool], dist.Work | AllOf | None]
"""Called with whether it is to return work to wait for (CPU) or run on the current stream (CUDA)."""


class Streams:
    """Where collectives run. On the CPU gloo's own threads are the stream; what comes before and after runs in the
    caller."""

    def launch(
        self,
        stream: str,
        collective: Collective | None,
        *,
        before: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
        after: Iterable[Token] = (),
    ) -> Token:
        """Start ``before``, ``collective`` and ``then`` on ``stream``, once the tokens in ``after`` are done."""
        with self._on(stream):
            for token in after:
                token.wait()
            if before is not None:
                before()
            return self._start(stream, collective, then)

    def mark(self) -> Token:
        """What the compute stream has been given so far."""
        return _NOTHING

    def fork(self) -> None:
        """Let every stream wait for the current one: a capture of the current one then takes them all in."""

    def join(self) -> None:
        """Let the current stream wait for all others."""

    def _on(self, stream: str) -> AbstractContextManager[object]:
        """What is done inside goes to that stream."""
        return nullcontext()

    def _start(self, stream: str, collective: Collective | None, then: Callable[[], None] | None) -> Token:
        """Start a collective, and what follows it, on the stream that is current."""
        return CpuToken(collective(True) if collective is not None else None, then)


class CudaStreams(Streams):
    """CUDA: a stream each for gathers, reductions, sums over replicas, exchanges of tensor-parallel parts and copies to
    the host and back. A launch waits only for what it names."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.index  # a number: torch takes long to see what a torch.device is
        self._streams = {name: torch.cuda.Stream(device) for name in ("gather", "reduce", "replicas", TENSOR, "host")}

    def mark(self) -> Token:
        return CudaToken(torch.cuda.current_stream(self._device).record_event(), self._device)

    def fork(self) -> None:
        for stream in self._streams.values():
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        for stream in self._streams.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def _on(self, stream: str) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[stream])

    def _start(self, stream: str, collective: Collective | None, then: Callable[[], None] | None) -> Token:
        if collective is not None:
            collective(False)
        if then is not None:
            then()
        return CudaToken(self._streams[stream].record_event(), self._device)


_NOTHING = CpuToken(None, None)


def streams_for(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else Streams()
