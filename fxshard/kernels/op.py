"""The operators that graphs contain: experts as one node forward, and backward as nodes that a scheduler can place.

Parameters enter as ordinary inputs, again in backward, and every weight gradient is the result of a node of its own
(``grouped_wgrad``, ``grouped_sum``): sharding gathers and reduces them as it does for any other node, and a weight
gradient can be moved without moving the rest. Saved for backward are the input and the pre-activations; the activation,
which is cheap, is computed again. An implementation that computes all of it again (``recomputes``) has one node for
backward, ``grouped_swiglu_gradients``, and the input alone is saved.

Tokens are sorted by expert; ``offsets[e]`` is where expert e's tokens end. Rows after the last offset are undefined,
as they are for torch's ``grouped_mm``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fxshard.kernels.by_torch import Call, Experts, TorchExperts
from fxshard.kernels.choose import implementation
from fxshard.kernels.glu import Glu
from fxshard.kernels.ops import define

# -- experts ---------------------------------------------------------------------------------------------------------


def _forward(
    x: torch.Tensor,
    offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts = Experts(gate, up, down, gate_bias, up_bias, down_bias)
    return _runs(options).forward(x, _call(offsets, experts, weights, options))


def _backward(
    grad: torch.Tensor,
    offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    pre: torch.Tensor,
    pre_up: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    experts = Experts(gate, up, down, down_bias=down_bias)
    return _runs(options).backward(grad, _call(offsets, experts, weights, options), pre, pre_up)


def _gradients(grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    *experts, weights = rest[:7]
    options = rest[7:]
    found = _runs(options).gradients(grad, x, _call(offsets, Experts(*experts), weights, options))
    ordered = (found.x, found.gate, found.up, found.down, found.gate_bias, found.up_bias, found.down_bias)
    return tuple(value if value is not None else x.new_empty(0) for value in (*ordered, found.weights))


def _call(offsets: torch.Tensor, experts: Experts, weights: torch.Tensor | None, options: tuple[Any, ...]) -> Call:
    *glu, weighted_bias, _ = options
    # Kernels find a routing weight by the number of its row.
    return Call(offsets, experts, None if weights is None else weights.contiguous(), _glu(*glu), weighted_bias)


_glu = cache(Glu)


def _runs(options: tuple[Any, ...]) -> TorchExperts:
    return implementation(options[-1])


def _fake_forward(
    x: torch.Tensor, offsets: torch.Tensor, gate: torch.Tensor, up: Any, down: torch.Tensor, *options: Any
) -> Any:
    tokens = x.shape[0]
    if _runs(options).recomputes:
        return x.new_empty(tokens, down.shape[-1]), x.new_empty(0), x.new_empty(0)
    pre_up = x.new_empty(tokens, up.shape[-1]) if up is not None else x.new_empty(0)
    return x.new_empty(tokens, down.shape[-1]), x.new_empty(tokens, gate.shape[-1]), pre_up


def _fake_backward(
    grad: torch.Tensor,
    offsets: torch.Tensor,
    gate: torch.Tensor,
    up: Any,
    down: torch.Tensor,
    down_bias: Any,
    weights: torch.Tensor | None,
    pre: torch.Tensor,
    pre_up: torch.Tensor,
    *_: Any,
) -> Any:
    tokens = grad.shape[0]
    return (
        grad.new_empty(tokens, gate.shape[-2]),
        torch.empty_like(pre),
        torch.empty_like(pre_up),
        grad.new_empty(tokens, down.shape[-2]),
        torch.empty_like(weights, memory_format=torch.contiguous_format) if weights is not None else grad.new_empty(0),
    )


def _fake_gradients(
    grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, gate: Any, up: Any, down: Any, *rest: Any
) -> Any:
    def like(value: torch.Tensor | None, memory_format: torch.memory_format) -> torch.Tensor:
        return x.new_empty(0) if value is None else torch.empty_like(value, memory_format=memory_format)

    weights = (like(value, torch.preserve_format) for value in (gate, up, down))
    return like(x, torch.contiguous_format), *weights, *(like(value, torch.contiguous_format) for value in rest[:4])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, offsets, gate, up, down, gate_bias, up_bias, down_bias, weights, *options = inputs
    _, pre, pre_up = output
    ctx.save_for_backward(x, offsets, gate, up, down, gate_bias, up_bias, down_bias, weights, pre, pre_up)
    ctx.mark_non_differentiable(pre, pre_up)
    ctx.options = tuple(options)


def _autograd(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    x, offsets, gate, up, down, gate_bias, up_bias, down_bias, weights, pre, pre_up = ctx.saved_tensors
    name, weighted_bias = ctx.options[-1], ctx.options[-2]
    needs = ctx.needs_input_grad
    if implementation(name).recomputes:
        inputs = (gate, up, down, gate_bias, up_bias, down_bias, weights)
        grad_x, *found = grouped_swiglu_gradients(grad, x, offsets, *inputs, *ctx.options)
        every = (grad_x, None, *found, *(None for _ in ctx.options))
        return tuple(value if need else None for value, need in zip(every, needs, strict=True))
    grad_x, grad_pre, grad_up, hidden, grad_weights = grouped_swiglu_backward(
        grad, offsets, gate, up, down, down_bias, weights, pre, pre_up, *ctx.options
    )
    grads: list[torch.Tensor | None] = [grad_x if needs[0] else None, None, None, None, None, None, None, None]
    grads.append(grad_weights if weights is not None and needs[8] else None)
    if needs[2]:
        grads[2] = _wgrad(x, grad_pre, gate, offsets, name)
    if up is not None and needs[3]:
        grads[3] = _wgrad(x, grad_up, up, offsets, name)
    if needs[4]:
        grads[4] = _wgrad(hidden, grad, down, offsets, name)
    if gate_bias is not None and needs[5]:
        grads[5] = grouped_sum(grad_pre, offsets, name)
    if up_bias is not None and needs[6]:
        grads[6] = grouped_sum(grad_up, offsets, name)
    if down_bias is not None and needs[7]:
        weighted = weights is not None and weighted_bias
        grads[7] = grouped_sum(grad * weights.to(grad.dtype).unsqueeze(-1) if weighted else grad, offsets, name)
    return (*grads, *(None for _ in ctx.options))


def _wgrad(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, name: str) -> torch.Tensor:
    """The gradient of ``weight``, with its strides: a transposed parameter gets a gradient it can take as it lies."""
    if weight.stride(-1) == 1:
        return grouped_wgrad(a, b, offsets, name)
    return grouped_wgrad(b, a, offsets, name).mT


# -- one grouped product ---------------------------------------------------------------------------------------------


def _setup_product(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.name = inputs
    ctx.save_for_backward(*tensors)


def _product_autograd(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight, offsets = ctx.saved_tensors
    grad_x = grouped_product(grad, weight.mT, offsets, ctx.name) if ctx.needs_input_grad[0] else None
    grad_weight = _wgrad(x, grad, weight, offsets, ctx.name) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None, None


# -- registration ----------------------------------------------------------------------------------------------------

_OPTIONS = "float alpha, float limit, float offset, int interleave, bool weighted_bias, str implementation"

grouped_swiglu = define(
    "grouped_swiglu(Tensor x, Tensor offsets, Tensor gate, Tensor? up, Tensor down, Tensor? gate_bias, "
    f"Tensor? up_bias, Tensor? down_bias, Tensor? weights, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    backward=_autograd,
    setup_context=_setup,
    flops=lambda x, offsets, gate, up, down, *_, **__: _products(x[0], gate, up, down),
    compiled_ahead=True,
)
grouped_swiglu_backward = define(
    "grouped_swiglu_backward(Tensor grad, Tensor offsets, Tensor gate, Tensor? up, Tensor down, Tensor? down_bias, "
    f"Tensor? weights, Tensor pre, Tensor pre_up, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    flops=lambda grad, offsets, gate, up, down, *_, **__: _products(grad[0], gate, up, down),
    compiled_ahead=True,
)
grouped_swiglu_gradients = define(
    "grouped_swiglu_gradients(Tensor grad, Tensor x, Tensor offsets, Tensor gate, Tensor? up, Tensor down, "
    f"Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, Tensor? weights, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
    flops=lambda grad, x, offsets, gate, up, down, *_, **__: 3 * _products(x[0], gate, up, down),
)
grouped_product = define(
    "grouped_product(Tensor x, Tensor weight, Tensor offsets, str implementation) -> Tensor",
    lambda x, weight, offsets, name: implementation(name).product(x, weight, offsets),
    lambda x, weight, offsets, name: x.new_empty(x.shape[0], weight.shape[-1]),
    backward=_product_autograd,
    setup_context=_setup_product,
    flops=lambda x, weight, *_, **__: _products(x[0], weight),
    compiled_ahead=True,
)
grouped_wgrad = define(
    "grouped_wgrad(Tensor a, Tensor b, Tensor offsets, str implementation) -> Tensor",
    lambda a, b, offsets, name: implementation(name).weight_gradient(a, b, offsets),
    lambda a, b, offsets, name: a.new_empty(offsets.shape[0], a.shape[1], b.shape[1]),
    flops=lambda a, b, *_, **__: 2 * a[0] * a[1] * b[1],
    compiled_ahead=True,
)
grouped_sum = define(
    "grouped_sum(Tensor a, Tensor offsets, str implementation) -> Tensor",
    lambda a, offsets, name: implementation(name).row_sum(a, offsets),
    lambda a, offsets, name: a.new_empty(offsets.shape[0], a.shape[1]),
)


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """``torch.nn.functional.grouped_mm`` for ``[tokens, in]`` and ``[experts, in, out]``, of any dtype, on any device.

    Torch's own can be compiled for bf16 only. Where two of them enclose a gated activation, fxshard fuses all three.

    >>> h = F.silu(fxshard.grouped_mm(x, gate.mT, offs=offsets)) * fxshard.grouped_mm(x, up.mT, offs=offsets)
    >>> y = fxshard.grouped_mm(h, down.mT, offs=offsets)
    """
    return grouped_product(x, weight, offs, "torch")


def _products(tokens: int, *weights: Any) -> int:
    return sum(2 * tokens * weight[-1] * weight[-2] for weight in weights if weight is not None)
