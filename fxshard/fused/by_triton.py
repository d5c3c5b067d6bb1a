# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""Experts with Triton kernels, where those were measured to be faster than torch's grouped GEMM: few tokens per expert.

The first product, gate and up, and the activation are one kernel. A tile of it computes the same columns of gate and of
up, so the activation needs nothing from another tile: the pre-activations are written once (backward wants them) and
never read again in forward. With many tokens per expert torch's products are faster (docs/benchmarks.md) and are used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fxshard.fused import hopper_products, product_kernels
from fxshard.fused.activation_kernels import glu_constants
from fxshard.fused.by_torch import Call, TorchExperts
from fxshard.fused.product_kernels import located, matrices, swizzled, tile_constants, tile_count

ROWS, COLUMNS, DEPTH = 128, 128, 64
"""A tile: tokens, columns of gate and as many of up, and how much of the input's width is multiplied at a time."""


class TritonExperts(TorchExperts):
    """The implementation ``triton``."""

    hopper = frozenset({"product", "up", "down"})
    """Steps that Gluon kernels compute on a Hopper."""

    def product(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if "product" in self.hopper and hopper_products.multiplies(x, weight.shape[-1]):
            return hopper_products.product(x.contiguous(), weight, offsets.int())
        if _few_rows(x, offsets) and weight.shape[1] % product_kernels.DEPTH == 0:
            return product_kernels.product(x, weight, offsets)
        return super().product(x, weight, offsets)

    def weight_gradient(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if "weights" in self.hopper and hopper_products.available(a.device):
            return hopper_products.weight_gradient(a.contiguous(), b.contiguous(), offsets.int())
        return super().weight_gradient(a, b, offsets)

    def down(
        self, grad: torch.Tensor, call: Call, pre: torch.Tensor, pre_up: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        down = call.experts.down.mT
        if "down" in self.hopper and call.weights is None and hopper_products.differentiates(grad, down.shape[-1]):
            found = hopper_products.derivative(grad.contiguous(), down, pre, pre_up, call.offsets.int(), call.glu)
            return *found, pre.new_empty(0)
        return super().down(grad, call, pre, pre_up)

    def up(self, x: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        experts, offsets, weights = call.experts, call.offsets, call.weights
        if "up" in self.hopper and hopper_products.multiplies(x, experts.down.shape[-2]):
            return hopper_products.up(x.contiguous(), experts.gate, experts.up, weights, offsets.int(), call.glu)
        if not _few_rows(x, offsets):
            return super().up(x, call)
        x = x.contiguous()
        tokens, width = x.shape
        joined = experts.up is None
        columns = experts.gate.shape[-1]
        inner = columns // 2 if joined else columns
        pre = x.new_empty(tokens, columns)
        pre_up = x.new_empty(0) if joined else x.new_empty(tokens, inner)
        hidden = x.new_empty(tokens, inner)
        if tokens == 0:
            return pre, pre_up, hidden
        transposed = experts.gate.stride(-1) != 1
        gate = matrices(experts.gate, transposed, COLUMNS, DEPTH)
        up = gate if experts.up is None else matrices(experts.up, transposed, COLUMNS, DEPTH)
        _up_kernel[(tile_count(tokens, inner, offsets.shape[0], ROWS, COLUMNS),)](
            TensorDescriptor.from_tensor(x, [ROWS, DEPTH]),
            *(gate, up, offsets.int(), weights, pre, pre[:, inner:] if joined else pre_up, hidden),
            *(width, inner, columns, inner if joined else 0, pre.stride(0), inner * 2 if joined else inner),
            TRANSPOSED=transposed,
            **tile_constants(offsets.shape[0], ROWS, COLUMNS, DEPTH),
            **glu_constants(weights, call.glu),
        )
        return pre, pre_up, hidden


def _few_rows(x: torch.Tensor, offsets: torch.Tensor) -> bool:
    """Whether experts have so few tokens that torch's grouped GEMM does not reach its full speed."""
    return x.shape[0] < 1024 * offsets.shape[0]


@triton.jit
def _up_kernel(
    x,
    gate,
    up,
    offsets,
    weights,
    pre_gate,
    pre_up,
    hidden,
    width,
    inner,
    columns,  # of the gate's weight: those of up included where they are joined
    up_column,  # where up begins in its weight
    gate_stride,
    up_stride,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CLAMPED: tl.constexpr,
    OFFSET: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    column_tiles = tl.cdiv(inner, COLUMNS)
    row_tile, column_tile = swizzled(tl.program_id(0), tl.num_programs(0) // column_tiles, column_tiles, SWIZZLE)
    expert, row, end = located(offsets, row_tile, EXPERTS, EXPERTS_PADDED, ROWS)
    if expert >= EXPERTS:
        return
    column = column_tile * COLUMNS

    gate_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, width, DEPTH):
        a = x.load([row, k])
        if TRANSPOSED:
            g = gate.load([expert * columns + column, k]).T
            u = up.load([expert * columns + up_column + column, k]).T
        else:
            g = gate.load([expert * width + k, column])
            u = up.load([expert * width + k, up_column + column])
        gate_sum = tl.dot(a, g, gate_sum)
        up_sum = tl.dot(a, u, up_sum)

    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    n = column + tl.arange(0, COLUMNS)
    inside = (rows < end)[:, None] & (n < inner)[None, :]
    kept_gate = gate_sum.to(pre_gate.dtype.element_ty)
    kept_up = up_sum.to(pre_gate.dtype.element_ty)
    tl.store(pre_gate + rows[:, None] * gate_stride + n[None, :], kept_gate, mask=inside)
    tl.store(pre_up + rows[:, None] * up_stride + n[None, :], kept_up, mask=inside)
    # From the rounded values, as backward will compute it again.
    g = kept_gate.to(tl.float32)
    u = kept_up.to(tl.float32)
    if CLAMPED:
        g = tl.minimum(g, LIMIT)
        u = tl.minimum(tl.maximum(u, -LIMIT), LIMIT)
    h = g * tl.sigmoid(ALPHA * g) * (u + OFFSET)
    if WEIGHTED:
        h = h * tl.load(weights + rows, mask=rows < end, other=0.0).to(tl.float32)[:, None]
    tl.store(hidden + rows[:, None] * inner + n[None, :], h.to(hidden.dtype.element_ty), mask=inside)
