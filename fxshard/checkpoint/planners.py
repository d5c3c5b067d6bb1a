"""The two planners that tell ``torch.distributed.checkpoint`` which rows of what each rank writes and reads.

torch derives the rows of a DTensor from its placement and takes them to be cut evenly. Layouts cut unevenly, so plans
are made from the layout's own records. A planner is the documented place to do that.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fxshard.checkpoint.held import Held
from fxshard.optim.moments import Deferred

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes that this rank has to do."""


def packed(value: Any) -> bytes:
    """An object as a checkpoint holds it; raises what ``torch.load`` would if it were not safe to read back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    torch.load(file, weights_only=True)
    return file.getvalue()


class SaveRows(DefaultSavePlanner):
    """Plans the writing of what a rank holds. What several ranks hold alike is written by one of them."""

    def __init__(
        self, held: Sequence[Held], objects: Mapping[tuple[str, ...], bytes], progress: Progress | None
    ) -> None:
        super().__init__()
        self._held: dict[MetadataIndex, Held] = {}
        self._objects = {MetadataIndex(".".join(path)): value for path, value in objects.items()}
        self._items = [WriteItem(index, WriteItemType.BYTE_IO) for index in self._objects]
        # Lets tools that restore a nested dictionary, such as dcp_to_torch_save, find the structure.
        self.mappings = {".".join(path): path for path in objects}
        for one in held:
            # A tensor with no elements at all is written too: its key belongs to the checkpoint.
            if one.writes and (one.tensor.numel() or (0 in one.shape and not any(one.offsets))):
                for name in one.names:
                    self._add(one, name)
        self._progress = _Counter(progress)

    def _add(self, one: Held, name: str) -> None:
        offsets, sizes = torch.Size(one.offsets), one.tensor.shape
        index = MetadataIndex(one.key(name), offsets)
        self._held[index] = one
        self.mappings[one.key(name)] = one.path(name)
        properties = TensorProperties(dtype=one.tensor.dtype)
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size(one.shape))
        self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        # What is saved was given to the constructor; torch's state_dict stays empty.
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items, planner_data=self.mappings)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        indices = [item.index for item in new_plan.items if item.index in self._held]
        self._progress.total = sum(self._held[index].tensor.nbytes for index in indices)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[write_item.index])
        tensor = self._held[write_item.index].now().contiguous()
        self._progress.add(tensor.nbytes)
        return _with_storage_of_its_own(tensor)


class Landing:
    """Memory of the host for what is kept in another form: taken over when all of it is there, and free then."""

    def __init__(self, rows: Deferred) -> None:
        self.tensor = torch.empty(rows.shape)  # takes no memory before something is read into it
        self._write, self._left = rows.write, self.tensor.numel()

    def arrived(self, numel: int) -> None:
        self._left -= numel
        if not self._left:
            self._write(self.tensor)
            self.tensor.untyped_storage().resize_(0)


@dataclass(frozen=True)
class Target:
    """A part of a stored tensor, and the memory it is to be read into; the shapes of the two agree."""

    key: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    landing: Landing | None = None
    """The landing that the memory is a part of."""


class LoadRows(LoadPlanner):
    """Plans the reading of ``targets``, and of pickled ``objects``, which are found in ``loaded`` afterwards."""

    def __init__(self, targets: Sequence[Target], objects: Sequence[str], progress: Progress | None = None) -> None:
        self.loaded: dict[str, Any] = {}
        self._targets, self._objects = targets, objects
        self._progress = _Counter(progress, sum(target.tensor.nbytes for target in targets))

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for number, target in enumerate(self._targets):
            stored = self._stored[target.key]
            assert isinstance(stored, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(target.offsets), target.tensor.shape)
            # One stored tensor may have several targets: a target is known by its number.
            items += [
                dataclasses.replace(item, dest_index=MetadataIndex(str(number)))
                for item in create_read_items_for_chunk_list(target.key, stored, [chunk])
            ]
        items += [_whole_object(key) for key in self._objects]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.loaded[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._targets[int(read_item.dest_index.fqn)].tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._progress.add(tensor.nbytes)
        landing = self._targets[int(read_item.dest_index.fqn)].landing
        if landing is not None:
            landing.arrived(tensor.numel())


def _with_storage_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, without what lies around it: torch would make copies of views, and keep them for a while."""
    if tensor.device.type != "cpu" or not tensor.nbytes or tensor.nbytes == tensor.untyped_storage().nbytes():
        return tensor
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # the result keeps it alive: it may have been made to be written
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class _Counter:
    """Adds up bytes and reports them to the progress callback."""

    def __init__(self, watch: Progress | None, total: int = 0) -> None:
        self.total, self._done, self._watch = total, 0, watch
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            if self._watch is not None:
                self._watch(self._done, self.total)


def _whole_object(key: str) -> ReadItem:
    nowhere = torch.Size([0])
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(key),
        dest_offsets=nowhere,
        storage_index=MetadataIndex(key),
        storage_offsets=nowhere,
        lengths=nowhere,
    )
