"""The optimizer state of one bucket: as its masters are, in fewer bits, on the host, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fxshard.optim.counts import StepCounts, own_rows
from fxshard.optim.formats import Noise
from fxshard.optim.host import Transfers
from fxshard.optim.packed import Stored
from fxshard.planner.layout import aligned
from fxshard.planner.state import PIECE_NUMEL, ROW_MOMENTS, moment_bytes, second_numel
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.host_memory import host_memory, untouched_memory
from fxshard.runtime.loaded_rows import with_rows

MOST_NUMEL = 2**30
"""Elements that are updated together, where they do not come from the host: fewer than kernels can count."""


class Moments(StepCounts):
    """State of a bucket, one parameter after another in one piece of memory, and a step count per parameter.

    ``first`` and ``second`` by position of the parameter; what Muon updates has no second moment, or, under NorMuon,
    one of each row, in the dtype of the masters.
    """

    def __init__(self, bucket: Bucket, format: str, transfers: Transfers | None, *, pinned: bool = True) -> None:
        super().__init__(bucket)
        plan, dtype = bucket.plan, bucket.plan.master_dtype
        self.format, self.transfers = format, transfers
        shapes = [slot.spec.shape for slot in plan.layout.slots]
        sizes = [moment_bytes(f.numel, shape, format, dtype) for f, shape in zip(self.fragments, shapes, strict=True)]
        moments = [1 if fragment.name in self.muon else 2 for fragment in self.fragments]
        of_rows = [second_numel(plan, f) if f.name in self.muon else 0 for f in self.fragments]
        length = sum(size * number for size, number in zip(sizes, moments, strict=True))
        length += sum(dtype.itemsize * aligned(numel) for numel in of_rows)
        if transfers is None:
            self.memory = torch.zeros(length, dtype=torch.uint8, device=bucket.device)
        elif not pinned:
            self.memory = untouched_memory(length)
        else:
            instead = 'keep the state on the device in fewer bits (state="8bit")'
            self.memory = host_memory(length, bucket.device, 'offload="host"', instead)
        self.first: list[Stored] = []
        self.second: list[Stored | None] = []
        at = 0
        for fragment, shape, size, number, rows in zip(self.fragments, shapes, sizes, moments, of_rows, strict=True):
            cut = [
                Stored.cut(self.memory[at + i * size :], fragment.numel, shape, format, signed=i == 0, exact=dtype)
                for i in range(number)
            ]
            self.first.append(cut[0])
            at += number * size
            if plan.row_moments and number == 1:  # too few for fewer bits
                cut.append(Stored.cut(self.memory[at:], rows, (rows, 1), "fp32", signed=False, exact=dtype))
                at += dtype.itemsize * aligned(rows)
            self.second.append(cut[1] if len(cut) == 2 else None)
        self._pieces = {piece: self._both(*piece) for piece in self._cuts()}
        if transfers is not None:
            for both in self._pieces.values():
                transfers.reserve(both)

    @property
    def place(self) -> str:
        """Where moments are, in the words of ``offload``."""
        return "none" if self.transfers is None else "host"

    def take_over(self, other: Moments) -> None:
        """The state of the same bucket, kept otherwise: values are those that a checkpoint would hold."""
        for i in range(len(self.fragments)):
            theirs = other.fields(i)
            for field, stored in self.fields(i).items():
                stored.write_(theirs[field].read().to(stored.values.device))
        self.counts = list(other.counts)
        self.steps.copy_(other.steps)

    # -- updating ----------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(position, begin, end) of what AdamW has to update: parameters with gradients, cut between rows."""
        return (piece for piece in self._pieces if self.bucket.params[piece[0]].grad is not None)

    def moments(self, i: int, begin: int, end: int) -> list[Stored]:
        """Both moments of a piece, where they are kept."""
        return self._pieces[i, begin, end]

    def _cuts(self) -> Iterator[tuple[int, int, int]]:
        most = PIECE_NUMEL if self.transfers is not None else MOST_NUMEL
        for i, fragment in enumerate(self.fragments):
            if fragment.numel and fragment.name not in self.muon:
                row = fragment.numel // max(fragment.rows, 1)
                step = max(most // row, 1) * row
                for begin in range(0, fragment.numel, step):
                    yield i, begin, min(begin + step, fragment.numel)

    def _both(self, i: int, begin: int, end: int) -> list[Stored]:
        second = self.second[i]
        assert second is not None
        return [self.first[i].part(begin, end), second.part(begin, end)]

    def noise(self, i: int, step: int, begin: int = 0) -> Noise:
        """For the rounding of a parameter's elements from ``begin`` on."""
        fragment = self.fragments[i]
        spec = self.bucket.plan.layout.slots[i].spec
        return Noise.of(fragment.name, step, fragment.row_start * spec.row_numel + begin)

    def momentum(self, name: str) -> torch.Tensor:
        """The momentum of one of Muon's parameters: the memory itself, or, where that is in fewer bits or the host's, a
        copy in fp32 to be changed and given back."""
        i = self.bucket.plan.layout.index[name]
        stored = self.first[i]
        if self.transfers is not None:
            (stored,) = self.transfers.bring([stored])
        return self.bucket.shaped(stored.values if stored.exact else stored.read(), name, self.fragments[i])

    def keep_momentum(self, name: str, momentum: torch.Tensor, step: int, refused: torch.Tensor | None) -> None:
        """Take back what ``momentum`` gave a copy of, rounded for the ``step``-th time."""
        i = self.bucket.plan.layout.index[name]
        stored = self.first[i]
        if self.transfers is None:
            if not stored.exact:
                stored.write_(momentum.view(-1), self.noise(i, step), refused)
            return
        if stored.exact:
            here = stored.holding(momentum.view(-1))
        else:
            # A step that is refused leaves what was there.
            (here,) = self.transfers.room([stored]) if refused is None else self.transfers.bring([stored])
            here.write_(momentum.view(-1), self.noise(i, step), refused)
        self.transfers.take_back([stored], [here])

    def row_moments(self, name: str) -> torch.Tensor:
        """The second moments of this rank's rows of a matrix, as [..., rows, 1]: the memory itself, or, where that is
        the host's, a copy to be changed and given back."""
        stored = self._of_rows(name)
        if self.transfers is not None:
            (stored,) = self.transfers.bring([stored])
        return self.bucket.shaped(stored.values, name, self.fragments[self.bucket.plan.layout.index[name]], ROW_MOMENTS)

    def keep_row_moments(self, name: str, moments: torch.Tensor) -> None:
        """Take them back, where ``row_moments`` gave a copy."""
        if self.transfers is not None:
            stored = self._of_rows(name)
            self.transfers.take_back([stored], [stored.holding(moments.view(-1))])

    def _of_rows(self, name: str) -> Stored:
        stored = self.second[self.bucket.plan.layout.index[name]]
        assert stored is not None
        return stored

    # -- state dicts -------------------------------------------------------------------------------------------------

    def fields(self, i: int) -> dict[str, Stored]:
        """The moments of a parameter by the names they have in ``optimizer.state``."""
        second = self.second[i]
        if self.fragments[i].name in self.muon:
            return {"momentum_buffer": self.first[i], **({} if second is None else {ROW_MOMENTS: second})}
        assert second is not None
        return {"exp_avg": self.first[i], "exp_avg_sq": second}

    def state_of(self, i: int) -> Mapping[str, torch.Tensor]:
        """The entry of ``optimizer.state`` for a parameter: views of the memory, or, where that is in fewer bits or the
        host's, fp32, made when it is asked for."""
        if self.format != "fp32" or self.transfers is not None:
            return Unpacked(self, i)
        fragment = self.fragments[i]
        views = {
            field: self.bucket.as_state(stored.values, fragment.name, fragment=fragment, field=field)
            for field, stored in self.fields(i).items()
        }
        return views if fragment.name in self.muon else {"step": self.steps[i], **views}

    def clear(self, i: int) -> None:
        """Reset the state of a parameter, as if it had never been stepped."""
        for stored in self.fields(i).values():
            for tensor in stored.tensors:
                tensor.zero_()
        self.set_count(i, 0)

    def load(self, i: int, state: Mapping[str, Any]) -> None:
        """Take over loaded state of a parameter, rounded to the nearest. Collective if it is cut in another way."""
        for field, stored in self.fields(i).items():
            given = state[field]
            if isinstance(given, DTensor):
                given = with_rows(self.state_of(i)[field], given)
            given = own_rows(self.bucket, given, self.fragments[i], stored.values.numel())
            stored.write_(given.to(stored.values.device, stored.read_dtype).contiguous())
        if "step" in state:
            self.set_count(i, int(state["step"]))


@dataclass(frozen=True)
class Deferred:
    """This rank's rows of a moment in fp32, made when they are read."""

    shape: torch.Size
    """The shape of the rows that this rank holds."""
    offsets: tuple[int, ...]
    """Where they begin in the whole parameter."""
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]


class Unpacked(Mapping[str, torch.Tensor]):
    """State of a parameter that is kept in fewer bits, as fp32. Each access makes a copy: to write to it changes
    nothing, ``load_state_dict`` does.
    """

    def __init__(self, moments: Moments, i: int) -> None:
        self._moments, self._i = moments, i
        self._fields = moments.fields(i)

    def __getitem__(self, field: str) -> torch.Tensor:
        if field == "step" and "exp_avg" in self._fields:
            return self._moments.steps[self._i]
        bucket, fragment = self._moments.bucket, self._moments.fragments[self._i]
        return bucket.as_state(self._fields[field].read(), fragment.name, fragment=fragment, field=field)

    def __iter__(self) -> Iterator[str]:
        return iter((*(["step"] if "exp_avg" in self._fields else []), *self._fields))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def deferred(self, field: str) -> Deferred:
        """A moment for a checkpoint, which reads and writes one after another."""
        stored, fragment = self._fields[field], self._moments.fragments[self._i]
        flat = torch.empty(stored.values.numel(), device="meta")
        shape = self._moments.bucket.shaped(flat, fragment.name, fragment, field).shape

        def read() -> torch.Tensor:
            return stored.read().view(shape)

        def write(given: torch.Tensor) -> None:
            stored.write_(given.to(stored.values.device).reshape(-1))

        return Deferred(shape, self._moments.bucket.offsets(fragment.name, fragment), read, write)
