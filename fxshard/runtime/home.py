"""Memory that is used again and again: where a gradient lives whose address a captured program knows, and where
activations go on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxshard._torch import private


class Home:
    """Memory that is lent out, one borrower at a time.

    Each loan is a tensor with a storage of its own over the same bytes, and the next loan is made when that storage,
    with every view of it, is gone. A captured backward writes the gradient of a shard to the same bytes whenever it is
    replayed, and a captured forward may keep activations in them meanwhile: it is ``closed`` then.
    """

    def __init__(self, memory: torch.Tensor, closed: Callable[[], bool] = lambda: False) -> None:
        self.memory = memory
        self._closed = closed
        self._borrower: private.StorageReference | None = None

    @property
    def free(self) -> bool:
        """Whether nothing holds what was lent last."""
        return self._borrower is None or self._borrower.expired()

    def free_but_for(self, gradient: torch.Tensor | None) -> bool:
        """Whether nothing but its owner, which may have this gradient, holds what was lent last."""
        at_home = gradient is not None and gradient.data_ptr() == self.memory.data_ptr()
        return self.free or at_home

    def lend(self) -> torch.Tensor | None:
        """The memory as a tensor, or None where it is still lent or activations lie in it."""
        if not self.free or self._closed():
            return None
        lent = private.same_memory(self.memory)
        self._borrower = private.StorageReference(lent)
        return lent
