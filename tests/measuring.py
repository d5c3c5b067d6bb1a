"""How much memory a test's own tensors take."""

from __future__ import annotations

import gc

import torch


class NewBytes:
    """Bytes of tensor storages that came into being since this object was made, and that can still be reached.

    It holds on to what was there before: garbage of an earlier test that goes away meanwhile would count negative.
    """

    def __init__(self) -> None:
        self._before = _tensors()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in self._before}

    def count(self) -> int:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors()}
        return sum(size for address, size in storages.items() if address not in self._known)


def _tensors() -> list[torch.Tensor]:
    gc.collect()
    plain = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]  # none fake
    return [tensor for tensor in plain if not tensor.is_meta and tensor.untyped_storage().nbytes()]
