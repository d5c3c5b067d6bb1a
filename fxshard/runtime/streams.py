"""Things that happen later: collectives beside compute, on CUDA streams or as gloo work on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist


class Token(Protocol):
    """Something that was started. Waiting twice is harmless."""

    def wait(self) -> None:
        """Order what the caller does next behind it: on CUDA the current stream waits, on the CPU the caller."""

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

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def done(self) -> bool:
        return self._event.query()


class Streams(Protocol):
    """Where collectives run."""

    def launch(
        self,
        stream: str,
        collective: Callable[[bool], dist.Work | AllOf | None] | None,
        *,
        before: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
        after: list[Token] | None = None,
    ) -> Token:
        """Start ``before``, ``collective`` and ``then`` on ``stream``, behind the tokens in ``after``.

        The collective is called with whether it is to return work to wait for (CPU) or run on the stream (CUDA).
        """

    def mark(self) -> Token:
        """What the compute stream has been given so far."""


class CpuStreams:
    """The CPU: gloo's own threads are the stream; what comes before and after runs in the caller."""

    def launch(
        self,
        stream: str,
        collective: Callable[[bool], dist.Work | AllOf | None] | None,
        *,
        before: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
        after: list[Token] | None = None,
    ) -> Token:
        for token in after or ():
            token.wait()
        if before is not None:
            before()
        return CpuToken(collective(True) if collective is not None else None, then)

    def mark(self) -> Token:
        return _NOTHING


class CudaStreams:
    """CUDA: a stream each for gathers, reductions and sums over replicas. A launch waits only for what it names."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {name: torch.cuda.Stream(device) for name in ("gather", "reduce", "replicas")}

    def launch(
        self,
        stream: str,
        collective: Callable[[bool], dist.Work | AllOf | None] | None,
        *,
        before: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
        after: list[Token] | None = None,
    ) -> Token:
        with torch.cuda.stream(self._streams[stream]):
            for token in after or ():
                token.wait()
            if before is not None:
                before()
            if collective is not None:
                collective(False)
            if then is not None:
                then()
            return CudaToken(self._streams[stream].record_event(), self._device)

    def mark(self) -> Token:
        return CudaToken(torch.cuda.current_stream(self._device).record_event(), self._device)


class _Nothing:
    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


_NOTHING = _Nothing()


def streams_for(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
