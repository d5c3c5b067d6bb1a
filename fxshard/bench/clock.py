"""The time of calls on a device, and the time the host takes to launch them: two figures that must not be mixed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Run = Callable[[], object]
MOST_PRODUCTS = 64


def take_turns(contenders: Mapping[str, Run], clock: Callable[[Run], float], rounds: int) -> dict[str, float]:
    """The median of what a clock says of each; in every round each runs once, after one call to warm up."""
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(clock(run))
    return {name: statistics.median(values) for name, values in times.items()}


def timed(run: Run, device: str, repeat: int) -> float:
    """Milliseconds per call, of ``repeat`` calls in a row."""
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeat):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / repeat
    start = time.perf_counter()
    for _ in range(repeat):
        run()
    return (time.perf_counter() - start) * 1e3 / repeat


class DeviceClock:
    """Times calls on a device. On a CPU, where the host computes, both figures are the time of a call."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._products = 4
        side = 8192 if device == "cuda" else 0
        self._ahead = torch.randn(side, side, device=device, dtype=torch.bfloat16)
        self._result = torch.empty_like(self._ahead)

    def milliseconds(self, run: Run, repeat: int) -> float:
        """The time of one call on the device alone.

        Long products go first, as many as it takes until all calls are queued before the first of them starts. Calls
        that wait for the device cannot be queued, and their launching is part of what is returned.
        """
        if self._device != "cuda":
            return timed(run, self._device, repeat)
        while True:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            for _ in range(self._products):
                torch.mm(self._ahead, self._ahead, out=self._result)
            start.record()
            for _ in range(repeat):
                run()
            stop.record()
            late = start.query()
            stop.synchronize()
            if not late or self._products >= MOST_PRODUCTS:
                return start.elapsed_time(stop) / repeat
            self._products *= 2

    def launching(self, run: Run) -> float:
        """Milliseconds until one call returns to the host, begun when the device is idle."""
        synchronize(self._device)
        begin = time.perf_counter()
        run()
        end = time.perf_counter()
        synchronize(self._device)
        return (end - begin) * 1e3


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
