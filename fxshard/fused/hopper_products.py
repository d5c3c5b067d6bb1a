"""Launches of the grouped products for Hopper, and where they can be used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from fxshard.fused import hopper_activation
from fxshard.fused.glu import SWIGLU, Glu

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fxshard.fused.hopper_kernels import grouped_kernel

    HAS_GLUON = True
except ImportError:  # torch for the CPU comes without Triton: ``available`` says so
    HAS_GLUON = False

PRODUCT, UP, DERIVATIVE, WEIGHTS = range(4)
STAGES, BAND = 4, 16
FAR, ANY = 2**30, 0x7FFF0000
"""Where groups end in the coordinates of a ragged descriptor, and a bound that no coordinate reaches."""

_compiled: dict[tuple[Any, ...], Any] = {}


@cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device: Gluon is there, and the GPU is a Hopper."""
    return HAS_GLUON and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def multiplies(x: torch.Tensor, width: int) -> bool:
    """Whether rows of this depth and a result of this width suit the kernels, whose first steps are unrolled."""
    suits = x.dtype == torch.bfloat16 and x.shape[1] % 64 == 0 and x.shape[1] >= 512 and width % 8 == 0
    return suits and x.shape[0] > 0 and available(x.device)


def differentiates(grad: torch.Tensor, inner: int) -> bool:
    """Whether the derivative of the activation fits beside the products of a tile."""
    return grad.shape[1] >= 1024 and multiplies(grad, inner)


def product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row of ``x`` times the matrix of its expert, ``[experts, in, out]``, either of the last two dense."""
    out = x.new_empty(x.shape[0], weight.shape[-1])
    b, b_t = _lying(weight)
    _launch(
        PRODUCT, offsets, _tiles(x.shape[0], offsets, out.shape[1], 256), b_t,
        a=_ragged(x, 128, 64), b=_plain(b, *((256, 64) if b_t else (64, 256))), first=_ragged(out, 128, 64),
        across=-(-out.shape[1] // 256), deep=x.shape[1], b_rows=weight.shape[-1] if b_t else x.shape[1],
    )  # fmt: skip
    return out


def up(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weights: torch.Tensor | None,
    offsets: torch.Tensor,
    glu: Glu = SWIGLU,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pre-activations, joined and nothing, or of gate and of up, and the activation."""
    columns = gate.shape[-1]
    inner = columns // 2 if up is None else columns
    pre = x.new_empty(x.shape[0], columns)
    pre_up = x.new_empty(0) if up is None else x.new_empty(x.shape[0], inner)
    hidden = x.new_empty(x.shape[0], inner)
    first, second = pre.split(inner, 1) if up is None else (pre, pre_up)
    b, b_t = _lying(gate)
    block = (128, 64) if b_t else (64, 128)
    b_desc = _plain(b, *block)
    up_desc = b_desc if up is None else _plain(_lying(up)[0], *block)
    _launch(
        UP, offsets, _tiles(x.shape[0], offsets, inner, 128), b_t,
        a=_ragged(x, 128, 64), b=b_desc, up=up_desc,
        first=_ragged(first, 128, 64), second=_ragged(second, 128, 64), third=_ragged(hidden, 128, 64),
        across=-(-inner // 128), deep=x.shape[1], b_rows=columns if b_t else x.shape[1],
        up_shift=inner if up is None else 0, weights=weights,
        asm=hopper_activation.activation(glu, weights is not None),
    )  # fmt: skip
    return pre, pre_up, hidden


def derivative(
    grad: torch.Tensor,
    down: torch.Tensor,
    pre: torch.Tensor,
    pre_up: torch.Tensor | None,
    offsets: torch.Tensor,
    glu: Glu = SWIGLU,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the pre-activations, in their layout, and the activation, from the gradient of the output."""
    inner = down.shape[-1]
    grad_pre = torch.empty_like(pre)
    grad_up = pre.new_empty(0) if pre_up is None else torch.empty_like(pre_up)
    hidden = pre.new_empty(pre.shape[0], inner)
    gate_in, up_in = pre.split(inner, 1) if pre_up is None else (pre, pre_up)
    first, second = grad_pre.split(inner, 1) if pre_up is None else (grad_pre, grad_up)
    b, b_t = _lying(down)
    _launch(
        DERIVATIVE, offsets, _tiles(grad.shape[0], offsets, inner, 256), b_t,
        a=_ragged(grad, 128, 64), b=_plain(b, *((256, 64) if b_t else (64, 256))),
        gate=_ragged(gate_in, 128, 32), up=_ragged(up_in, 128, 32),
        first=_ragged(first, 128, 32), second=_ragged(second, 128, 32), third=_ragged(hidden, 128, 32),
        across=-(-inner // 256), deep=grad.shape[1], b_rows=inner if b_t else grad.shape[1],
        asm=hopper_activation.derivative(glu), pace=4 if grad.shape[1] >= 2048 else 2,
    )  # fmt: skip
    return grad_pre, grad_up, hidden


def weight_gradient(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``aᵀ b`` over the rows of each expert."""
    experts, rows, columns = offsets.shape[0], a.shape[1], b.shape[1]
    out = a.new_empty(experts, rows, columns)
    across = -(-columns // 256)
    _launch(
        WEIGHTS, offsets, experts * -(-rows // 128) * across, False,
        a=_ragged(a, 64, 128), b=_ragged(b, 64, 256), first=_plain(out, 1, 128, 64),
        across=across, result_rows=rows,
    )  # fmt: skip
    return out


def _launch(
    mode: int,
    offsets: torch.Tensor,
    tiles: int,
    b_t: bool,
    *,
    a: Any,
    b: Any,
    first: Any,
    up: Any = None,
    second: Any = None,
    third: Any = None,
    gate: Any = None,
    weights: torch.Tensor | None = None,
    across: int,
    deep: int = 0,
    b_rows: int = 0,
    up_shift: int = 0,
    result_rows: int = 0,
    asm: str = "",
    pace: int = 0,
) -> None:
    experts = offsets.shape[0]
    padded = max(32, 1 << (experts - 1).bit_length())
    grid = (min(tiles, _processors(offsets.device)), 1, 1)
    descriptors = (a, b, up, first, second, third, gate)
    numbers = (experts, across, deep, b_rows, up_shift, result_rows)
    constants = (mode, b_t, padded, STAGES, BAND, pace, asm, weights is not None)
    # What Triton compiles for: looked up here, it does not go through all arguments at every call.
    kinds = tuple((tensor.dtype, tensor.data_ptr() % 16) for tensor in (offsets, weights) if tensor is not None)
    key = (constants, kinds, offsets.device)
    kernel = _compiled.get(key)
    if kernel is None:
        described = [each if each is None else each.described() for each in descriptors]
        # Of 384 threads: 40 registers for those that copy leave 232 for those that multiply.
        options = {"num_warps": 8, "maxnreg": 168}
        _compiled[key] = grouped_kernel[grid](*described, offsets, weights, *numbers, *constants, **options)
    else:
        kernel[grid](*descriptors, offsets, weights, *numbers, *constants)


def _tiles(tokens: int, offsets: torch.Tensor, width: int, columns: int) -> int:
    """How many tiles there are at most: each expert may leave one half empty."""
    return (-(-tokens // 128) + offsets.shape[0]) * -(-width // columns)


def _lying(weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """All experts' matrices below one another, as they lie in memory, and whether they lie transposed."""
    transposed = weight.stride(-1) != 1
    return (weight.mT if transposed else weight).contiguous().flatten(0, 1), transposed


class Copies(NamedTuple):
    """What a ``TensorDescriptor`` says. Only those that a kernel is compiled with are checked: it takes time."""

    base: torch.Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block: tuple[int, ...]
    padding: str = "zero"

    def described(self) -> Any:
        layout = gl.NVMMASharedLayout.get_default_for(list(self.block), gl.bfloat16)
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block), layout)


def _plain(tensor: torch.Tensor, *block: int) -> Copies:
    return Copies(tensor, tensor.shape, tensor.stride(), block)


def _ragged(tensor: torch.Tensor, rows: int, columns: int) -> Copies:
    """For copies within a group of rows, whose bounds the copy is given: row r of ``[begin, begin + size)`` has the
    coordinates ``FAR, begin + size, FAR - size + r``. Addresses wrap around at 2⁶⁴: the first two put it in its place.
    """
    stride = tensor.stride(0)
    return Copies(tensor, (ANY, ANY, FAR, tensor.shape[1]), (2**34 - stride, stride, stride, 1), (1, 1, rows, columns))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
