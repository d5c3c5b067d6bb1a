"""A stopwatch for programs: how long each stretch of compute and each collective takes, each one alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fxshard.schedule.events import Phase
from fxshard.schedule.profile import Key


class Recorder:
    """Times the instructions of the next ``steps`` steps. Overlap is off meanwhile, so nothing slows anything else."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._steps_left = steps
        self._recording = False
        self._open: list[tuple[Key, torch.cuda.Event, torch.cuda.Event]] = []
        self.samples: dict[Key, list[float]] = {}

    def begin(self, phase: Phase) -> None:
        """A program starts: count steps by their forward."""
        if phase is Phase.FORWARD:
            self._recording = self._steps_left > 0
            self._steps_left -= 1
        elif phase is not Phase.BACKWARD:
            self._recording = False

    def run(self, key: Key | None, call: Callable[[list[Any]], Any], values: list[Any]) -> Any:
        """Call, and note how long it took."""
        if key is None or not self._recording:
            return call(values)
        if self._cuda is None:
            started = time.perf_counter()
            result = call(values)
            self.samples.setdefault(key, []).append(time.perf_counter() - started)
            return result
        stream = torch.cuda.current_stream(self._cuda)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        result = call(values)
        after.record(stream)
        self._open.append((key, before, after))
        return result

    def close(self) -> None:
        """Read the device's clocks."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        for key, before, after in self._open:
            self.samples.setdefault(key, []).append(before.elapsed_time(after) / 1e3)
        self._open.clear()
