"""How much memory a test's own tensors take."""

from __future__ import annotations

import gc
from typing import Any

import torch


class NewBytes:
    """Bytes of the storages of tensors that came into being since this object was made, and that can still be reached.

    It holds on to what was there before: garbage of an earlier test that goes away meanwhile would count negative.
    """

    def __init__(self) -> None:
        self._before = _tensors()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in self._before}
        gc.freeze()  # or every count would look at all modules that are loaded

    def count(self) -> int:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors()}
        return sum(size for address, size in storages.items() if address not in self._known)


def _tensors() -> list[torch.Tensor]:
    gc.collect()
    plain = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]  # none fake
    return [tensor for tensor in plain if not tensor.is_meta and tensor.untyped_storage().nbytes()]


class AllocatedPeak:
    """The most bytes that the CPU allocator handed out inside a block, beyond what it had handed out before.

    >>> with AllocatedPeak() as peak:
    ...     model(*batch).backward()
    >>> peak.bytes
    """

    def __enter__(self) -> AllocatedPeak:
        self.bytes = 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        found = self._profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        changes = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")
        assert changes, "the profiler recorded no allocation"
        held = 0
        for _, change in changes:
            held += change
            self.bytes = max(self.bytes, held)
