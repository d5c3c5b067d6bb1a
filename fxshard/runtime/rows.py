"""Rows of a tensor that know which rows they are, as ``torch.distributed.checkpoint`` asks for them.

Asked for its piece of the whole, a DTensor computes where evenly cut rows would lie, unless the tensor it wraps knows
better: then that one answers. Nothing else about these tensors is special. ``copy.deepcopy`` keeps the answer; what is
computed from them, and what is saved, are plain tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fxshard._torch import private

if TYPE_CHECKING:  # not to be imported before a checkpoint is written
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def _nothing() -> None:
    """A copy is the shard of no parameter."""


class Rows(torch.Tensor):
    """This rank's rows of a parameter or of its state, in place; made by :func:`rows_of`."""

    __torch_function__ = private.PLAIN_RESULTS

    _at: tuple[int, ...]
    _whole: torch.Size
    _written: Callable[[], None]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the first element is in the whole tensor."""
        return self._at

    def __create_write_items__(self, name: str, whole: torch.Tensor) -> list[WriteItem]:
        """What this rank has to write: nothing if it holds no rows."""
        if self._whole.numel() and not self.numel():
            return []
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        (chunk,) = self._chunks()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(_plain(self)), self._whole)
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank is about to read. Every rank is asked, one without rows too: all see the change alike."""
        self._written()
        return self._chunks() if self.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return _plain(self)

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(self._at), self.size())]

    def new_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The copies that ``dcp.async_save`` writes from begin like this; it adds our attributes."""
        return _plain(self).new_empty(*args, **kwargs).as_subclass(Rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = copy.deepcopy(_plain(self), memo)  # which keeps the argument alive: the memo goes by addresses
        memo[id(self)] = rows = rows_of(copied, self._at, self._whole, _nothing)
        return rows


def rows_of(
    local: torch.Tensor, at: tuple[int, ...], whole: torch.Size, written: Callable[[], None] = _nothing
) -> Rows:
    """``local`` as rows of a tensor of shape ``whole``, of which the first element is at ``at``.

    ``written`` is called before a checkpoint is read into them.
    """
    rows = local.as_subclass(Rows)
    rows._at, rows._whole, rows._written = at, whole, written
    return rows


def _plain(rows: torch.Tensor) -> torch.Tensor:
    return rows.as_subclass(torch.Tensor)
