"""Transformer Engine's fused grouped MLP as operators of a graph: forward, backward, and each weight gradient.

Weights enter quantized, rowwise in forward and columnwise in backward, where the graph quantizes them or, if they rest
so, where they were gathered. What forward keeps for backward are tensors of the graph: tokens and activations as E4M3,
quantized down the columns, and pre-activations. ``te_mlp`` calls Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxshard.kernels import te_mlp
from fxshard.kernels.glu import Glu
from fxshard.kernels.mxfp8 import COLUMNWISE, ROWWISE, Quantized
from fxshard.kernels.ops import define
from fxshard.kernels.te_mlp import Columns, Form, FusedMlp, Weights, fused_mlp, scale_bytes


def _forward(x: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *given, trains = rest
    mlp, weights, scales = _prepared(x, tuple(given), ROWWISE)
    found = mlp.forward(x, offsets, weights, scales, trains)
    if isinstance(found, Tensor):
        return found, *(x.new_empty(0) for _ in range(5))
    out, tokens, pre, hidden = found
    return out, tokens.data, tokens.scales, pre, hidden.data, hidden.scales


def _backward(grad: Tensor, offsets: Tensor, pre: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    mlp, weights, scales = _prepared(grad, rest, COLUMNWISE)
    grad_x, grad_scales, of_pre, of_out, biases = mlp.backward(grad, offsets, weights, scales, pre)
    found = [grad.new_empty(0) if each is None else each for each in biases]
    return grad_x, grad_scales, of_pre.data, of_pre.scales, of_out.data, of_out.scales, *found


def _prepared(x: Tensor, given: tuple[Any, ...], axis: int) -> tuple[FusedMlp, Weights, Tensor]:
    gate, gate_scales, down, down_scales, gate_bias, down_bias, weights, *glu, weighted_bias = given
    experts, out, inner = down.shape
    biased = gate_bias is not None, down_bias is not None
    scales_bias = biased[1] and weighted_bias and weights is not None
    form = Form(experts, gate.shape[2], inner, out, Glu(*glu), biased, scales_bias, x.dtype, x.device)
    stacks = Quantized(gate, gate_scales, axis), Quantized(down, down_scales, axis)
    scales = x.new_ones(x.shape[0]) if weights is None else weights.contiguous()
    return fused_mlp(form), Weights(*stacks, gate_bias, down_bias), scales


def _fake_forward(x: Tensor, offsets: Tensor, gate: Tensor, gate_scales: Tensor, down: Tensor, *rest: Any) -> Any:
    rows, (_, out, inner) = x.shape[0], down.shape
    if not rest[-1]:
        return x.new_empty(rows, out), *(x.new_empty(0) for _ in range(5))
    pre = x.new_empty(rows, gate.shape[1])
    return x.new_empty(rows, out), *_fake_columns(x, rows, x.shape[1]), pre, *_fake_columns(x, rows, inner)


def _fake_backward(
    grad: Tensor, offsets: Tensor, pre: Tensor, gate: Tensor, gate_scales: Tensor, down: Tensor, *rest: Any
) -> Any:
    rows, gate_bias, down_bias = grad.shape[0], rest[1], rest[2]
    columns = *_fake_columns(grad, rows, gate.shape[1]), *_fake_columns(grad, rows, down.shape[1])
    biases = (grad.new_empty(0 if bias is None else bias.shape) for bias in (gate_bias, down_bias))
    of_weights = grad.new_empty(rows, dtype=grad.dtype if rest[3] is None else rest[3].dtype)
    return grad.new_empty(rows, gate.shape[2]), of_weights, *columns, *biases


def _fake_columns(like: Tensor, rows: Any, width: int) -> tuple[Tensor, Tensor]:
    data = like.new_empty((rows, width), dtype=torch.uint8)
    return data, like.new_empty(scale_bytes(rows, width), dtype=torch.uint8)


def _wgrad(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    return te_mlp.weight_gradient(Columns(a, a_scales), Columns(b, b_scales), offsets, dtype)


_WEIGHTS = "Tensor gate, Tensor gate_scales, Tensor down, Tensor down_scales, Tensor? gate_bias, Tensor? down_bias"
_OPTIONS = "Tensor? weights, float alpha, float limit, float offset, int interleave, bool weighted_bias"

te_mlp_forward = define(
    f"te_mlp_forward(Tensor x, Tensor offsets, {_WEIGHTS}, {_OPTIONS}, bool trains) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    flops=lambda x, offsets, gate, gate_scales, down, *_, **__: _products(x[0], gate, down),
)
te_mlp_backward = define(
    f"te_mlp_backward(Tensor grad, Tensor offsets, Tensor pre, {_WEIGHTS}, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    flops=lambda grad, offsets, pre, gate, gate_scales, down, *_, **__: _products(grad[0], gate, down),
)
te_mlp_wgrad = define(
    "te_mlp_wgrad(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor offsets, ScalarType dtype) -> Tensor",
    _wgrad,
    lambda a, a_scales, b, b_scales, offsets, dtype: a.new_empty(
        (offsets.shape[0], a.shape[1], b.shape[1]), dtype=dtype
    ),
    flops=lambda a, a_scales, b, *_, **__: 2 * a[0] * a[1] * b[1],
)


def _products(tokens: int, *stacks: Any) -> int:
    return sum(2 * tokens * stack[1] * stack[2] for stack in stacks)
