"""Launches of the grouped products for Hopper, and where they can be used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from fxshard.kernels import hopper_activation
from fxshard.kernels.glu import SWIGLU, Glu
from fxshard.kernels.launch import Launches, aligned, pointers, processors

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fxshard.kernels.hopper_gradient import gradient_kernel
    from fxshard.kernels.hopper_kernels import grouped_kernel

    HAS_GLUON = True
    # Of 384 threads: 40 registers for those that copy leave 232 for those that multiply.
    _launches = Launches(grouped_kernel, num_warps=8, maxnreg=168)
    _gradients = Launches(gradient_kernel, num_warps=8, maxnreg=168)
except ImportError:  # torch for the CPU comes without Triton: ``refusal`` says so
    HAS_GLUON = False

DEPTH, SHALLOWEST = 64, 512
"""The depth must be a multiple of the first, the depth of a stage, and at least the second: the first steps of a tile,
after which the parts of the tile before it are stored, are unrolled."""
NARROWEST = 128
"""Columns that weight gradients must have at least in both directions: as many as a tile has rows."""
STAGES, BAND = 4, 16
GRADIENT_BAND = 8
"""Rows of tiles of a weight gradient that are walked over together. Measured on an H200 (docs/design/hopper.md):
1 to 5 % less time than with 16, 2 to 9 % less than with 32. Of a matrix of 4096 × 4096, eight rows are 128 tiles: one
round of its 132 processors."""
FAR, ANY = 2**30, 0x7FFF0000
"""Where groups end in the coordinates of a ragged descriptor, and a bound that no coordinate reaches."""


def refusal(device: torch.device) -> str | None:
    """Why the kernels do not run on this device, or None."""
    if device.type != "cuda":
        return f"they are on {device.type}, its kernels need a CUDA device"
    reason = capability_refusal(*torch.cuda.get_device_capability(device))
    if reason is None and not HAS_GLUON:
        return "its kernels need Gluon, which Triton 3.6 has: Triton is missing or another one"
    return reason


def capability_refusal(major: int, minor: int) -> str | None:
    """Why the kernels do not run on a GPU of this compute capability, or None."""
    return None if major == 9 else f"its kernels are for Hopper, compute capability 9.0, this is {major}.{minor}"


@cache
def available(device: torch.device) -> bool:
    return refusal(device) is None


def multiplies(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether the kernels can multiply these rows, which are dense, by these matrices."""
    tokens, depth = x.shape
    if tokens == 0 or depth % DEPTH or depth < SHALLOWEST or not available(x.device):
        return False
    tensors = (x, *weights)
    if any(tensor.dtype != torch.bfloat16 or not aligned(tensor) for tensor in tensors):
        return False
    return all(weight.shape[-1] % 8 == 0 for weight in weights)


def product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row of ``x`` times the matrix of its expert, ``[experts, in, out]``, either of the last two dense."""
    tokens, width = x.shape[0], weight.shape[-1]
    out = x.new_empty(tokens, width)
    b_t = _b_t(weight)
    b, b_rows = _matrices(weight, 256, b_t)
    across = -(-width // 256)
    copies = (_ragged(x, x.shape[1]), b, None, None, None, _ragged(out, width), None, None)
    _launch(copies, offsets, None, tokens, (across, x.shape[1], 0, b_rows, 0), b_t, "")
    return out


def adds(x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the kernels can compute ``x·weight + narrow·other``; left operands are dense, the others either way."""
    if not multiplies(x, weight) or _b_t(weight) != _b_t(other):
        return False
    if any(tensor.dtype != torch.bfloat16 or not aligned(tensor) for tensor in (narrow, other)):
        return False
    return narrow.shape[1] % 8 == 0 and min(weight.stride()) == min(other.stride()) == 1


def sum_of_products(x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``x·weight + narrow·other``, summed up in fp32 and rounded once."""
    tokens, width = x.shape[0], weight.shape[1]
    out = x.new_empty(tokens, width)
    b_t = _b_t(weight)
    (b, _), (more_b, _) = (_matrices(matrix.unsqueeze(0), 256, b_t) for matrix in (weight, other))
    more_a = _ragged(narrow, narrow.shape[1])
    ends = torch.full((1,), tokens, dtype=torch.int32, device=x.device)
    copies = (_ragged(x, x.shape[1]), b, None, more_a, more_b, _ragged(out, width), None, None)
    _launch(copies, ends, None, tokens, (-(-width // 256), x.shape[1], narrow.shape[1], 0, 0), b_t, "")
    return out


def _b_t(weight: torch.Tensor) -> bool:
    """Whether columns, and not rows, of a matrix are dense, as of the transpose of a linear layer's."""
    return weight.stride(-1) != 1


def up(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weights: torch.Tensor | None,
    offsets: torch.Tensor,
    glu: Glu = SWIGLU,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pre-activations, joined and nothing, or of gate and of up, and the activation."""
    tokens, columns = x.shape[0], gate.shape[-1]
    inner = columns // 2 if up is None else columns
    pre = x.new_empty(tokens, columns)
    pre_up = x.new_empty(0) if up is None else x.new_empty(tokens, inner)
    hidden = x.new_empty(tokens, inner)
    second = pre.narrow(1, inner, inner) if up is None else pre_up
    b_t = _b_t(gate)
    b, b_rows = _matrices(gate, 128, b_t)
    b_up = b if up is None else _matrices(up, 128, b_t)[0]
    outputs = (_ragged(pre, inner), _ragged(second, inner), _ragged(hidden, inner))
    numbers = (-(-inner // 128), x.shape[1], 0, b_rows, inner if up is None else 0)
    asm = hopper_activation.activation(glu, weights is not None)
    _launch((_ragged(x, x.shape[1]), b, b_up, None, None, *outputs), offsets, weights, tokens, numbers, b_t, asm)
    return pre, pre_up, hidden


def differentiates(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the kernel for weight gradients can multiply these, which are dense."""
    tokens = a.shape[0]
    if tokens == 0 or not available(a.device):
        return False
    if any(tensor.dtype != torch.bfloat16 or not aligned(tensor) for tensor in (a, b)):
        return False
    return all(tensor.shape[1] % 8 == 0 and tensor.shape[1] >= NARROWEST for tensor in (a, b))


def gradient(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``aᵀ b`` over the rows of each expert, ``[experts, columns of a, columns of b]``."""
    experts, rows, columns = offsets.shape[0], a.shape[1], b.shape[1]
    out = a.new_empty(experts, rows, columns)
    height, across = -(-rows // 128), -(-columns // 256)
    result = Copies(out, (experts, rows, columns), (rows * columns, columns, 1), (1, 128, 64))
    copies = (_ragged(a, rows, (64, 128)), _ragged(b, columns, (64, 256)), result)
    grid = (min(experts * height * across, processors(a.device)), 1, 1)
    key = (pointers(offsets), a.device)
    _gradients(key, grid, (*copies, offsets, experts, height, across, STAGES, GRADIENT_BAND), _described)
    return out


def _launch(
    copies: tuple[Copies | None, ...],
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    tokens: int,
    numbers: tuple[int, int, int, int, int],
    b_t: bool,
    asm: str,
) -> None:
    experts, device = offsets.shape[0], offsets.device
    # As many row tiles at most: each expert may leave one half empty.
    tiles = (-(-tokens // 128) + experts) * numbers[0]
    padded = max(32, 1 << (experts - 1).bit_length())
    constants = (asm != "", copies[3] is not None, b_t, padded, STAGES, BAND, asm, weights is not None)
    # Descriptors of a mode are always of the same blocks, and for numbers the kernel is not specialised.
    key = (constants, pointers(offsets, weights), device)
    grid = (min(tiles, processors(device)), 1, 1)
    _launches(key, grid, (*copies, offsets, weights, experts, *numbers, *constants), _described)


class Copies(NamedTuple):
    """What a ``TensorDescriptor`` says. Only those that a kernel is compiled with are checked: it takes time."""

    base: torch.Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block: tuple[int, ...]
    padding: str = "zero"


def _matrices(weight: torch.Tensor, columns: int, transposed: bool) -> tuple[Copies, int]:
    """All experts' matrices below one another, for blocks of that many columns, and how many rows each has there.

    Copied only where they do not lie like that.
    """
    experts, depth, width = weight.shape
    lying = (weight.mT if transposed else weight).contiguous()
    rows, across, block = (width, depth, (columns, DEPTH)) if transposed else (depth, width, (DEPTH, columns))
    return Copies(lying, (experts * rows, across), (across, 1), block), rows


def _ragged(tensor: torch.Tensor, columns: int, block: tuple[int, int] = (128, DEPTH)) -> Copies:
    """For copies within a group of rows, whose bounds the copy is given: row r of ``[begin, begin + size)`` has the
    coordinates ``FAR, begin + size, FAR - size + r``. Addresses wrap around at 2⁶⁴: the first two put it in its place.
    """
    stride = tensor.stride(0)
    return Copies(tensor, (ANY, ANY, FAR, columns), (2**34 - stride, stride, stride, 1), (1, 1, *block))


def _described(args: tuple[Any, ...]) -> Iterable[Any]:
    """The arguments of a launch as Triton takes them."""
    for arg in args:
        if isinstance(arg, Copies):
            layout = gl.NVMMASharedLayout.get_default_for(list(arg.block), gl.bfloat16)
            yield TensorDescriptor(arg.base, list(arg.shape), list(arg.strides), list(arg.block), layout)
        else:
            yield arg
