"""Groups of tokens padded to multiples of what a kernel asks for, and back. Nothing is read on the host.

The padded tensor has as many rows as the worst routing needs, a number that depends on shapes alone. Padding is zeros,
in tokens, routing weights and the gradient of the output, so that no sum over the tokens of an expert changes. Rows of
the result that no token stands in are dropped when it is unpadded, whatever a kernel left there.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.kernels.ops import define


def padded_rows(rows: Any, groups: Any, alignment: int) -> Any:
    """Rows that any split of ``rows`` into ``groups`` fits into, each padded to a multiple of ``alignment``."""
    return (rows + groups * (alignment - 1)) // alignment * alignment


def _pad_groups(offsets: torch.Tensor, rows: int, alignment: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the padded groups end; the row that stands in each padded row, and where each row stands; -1 for none."""
    ends = offsets.long()
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    sizes = (ends - begins + alignment - 1) // alignment * alignment
    padded_ends = sizes.cumsum(0)
    padded_begins = padded_ends - sizes
    padded = padded_rows(rows, offsets.shape[0], alignment)
    inside = _moved(padded, padded_ends, padded_begins, begins, ends)
    places = _moved(rows, ends, begins, padded_begins, padded_ends)
    return padded_ends.to(offsets.dtype), inside, places


def _moved(
    rows: int, ends: torch.Tensor, begins: torch.Tensor, other_begins: torch.Tensor, other_ends: torch.Tensor
) -> torch.Tensor:
    """For each of ``rows`` rows the one at the same place of the same group in the other order, or -1."""
    row = torch.arange(rows, device=ends.device)
    group = torch.searchsorted(ends, row, right=True).clamp_(max=ends.shape[0] - 1)
    there = row - begins[group] + other_begins[group]
    return torch.where((row < ends[-1]) & (there < other_ends[group]), there, -1)


def _take_rows(x: torch.Tensor, rows: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Row ``rows[i]`` of ``x`` in row i, zeros for -1."""
    if x.shape[0] == 0:
        return x.new_zeros(rows.shape[0], *x.shape[1:])
    taken = x.index_select(0, rows.clamp(min=0))
    return taken.masked_fill_((rows < 0).view(-1, *(1 for _ in x.shape[1:])), 0)


def _fake_pad_groups(offsets: torch.Tensor, rows: Any, alignment: int) -> tuple[torch.Tensor, ...]:
    padded = padded_rows(rows, offsets.shape[0], alignment)
    index = offsets.new_empty
    return index(offsets.shape), index(padded, dtype=torch.int64), index(rows, dtype=torch.int64)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, rows, back = inputs
    ctx.save_for_backward(rows, back)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Every row goes to one place at most, so the gradient is gathered as well: nothing is added up."""
    rows, back = ctx.saved_tensors
    return take_rows(grad, back, rows), None, None


pad_groups = define(
    "pad_groups(Tensor offsets, SymInt rows, int alignment) -> (Tensor, Tensor, Tensor)", _pad_groups, _fake_pad_groups
)
take_rows = define(
    "take_rows(Tensor x, Tensor rows, Tensor back) -> Tensor",
    _take_rows,
    lambda x, rows, back: x.new_empty(rows.shape[0], *x.shape[1:]),
    backward=_backward,
    setup_context=_setup,
)
