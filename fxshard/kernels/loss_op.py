"""The head's product and the cross-entropy after it, over chunks of tokens: full logits never exist.

For each chunk the logits are computed, then its losses, and in the place of its logits their gradient, from which those
of the hidden states, the weight and the bias follow. So each product is computed once, as with full logits, and
backward only multiplies by the gradient of the loss: neither weight nor logits are needed there. Gradients are those of
the sum of all losses, in fp32 (fp64 for fp64): what they are multiplied by in backward, the mean's divisor included, is
not rounded twice, and small factors lose nothing in half precision.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.kernels.loss_rows import Cap, rows_loss, wide
from fxshard.kernels.ops import define, scaled

Maybe = torch.Tensor | None


def _forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: Maybe,
    labels: torch.Tensor,
    ignore_index: int,
    mean: bool,
    inner: float,
    tanh: bool,
    outer: float,
    rows: int,
    of_hidden: bool,
    of_weight: bool,
) -> tuple[torch.Tensor, ...]:
    gradient = of_hidden or of_weight
    grads = _empty_gradients(hidden, weight, bias, of_hidden, of_weight)
    if not hidden.shape[0]:  # else the first chunk writes what others are added to
        for grad in grads:
            grad.zero_()
    counts = labels != ignore_index
    classes = labels.masked_fill(~counts, 0)
    losses = torch.zeros(hidden.shape[0], dtype=wide(hidden.dtype), device=hidden.device)
    buffer: Maybe = None
    for part in _chunks(hidden.shape[0], rows):
        x = hidden[part]
        if buffer is None:
            buffer = hidden.new_empty(x.shape[0], weight.shape[0])
        logits = buffer[: x.shape[0]]
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        losses[part] = rows_loss(logits, classes[part], counts[part], Cap(inner, tanh, outer), gradient=gradient)
        if gradient:
            _add_gradients(logits, x, weight, part, grads)
    count = counts.sum().to(losses.dtype)
    # Where no label counts the mean is NaN, as torch has it, and gradients are 0.
    scale = torch.where(count > 0, 1 / count, 0.0) if mean else torch.ones_like(count)
    total = losses.sum()
    return total / count if mean else total, scale, *grads


def _chunks(tokens: int, rows: int) -> list[slice]:
    """Parts of at most ``rows`` tokens, about equal: products prefer multiples of 128."""
    parts = max(1, -(-tokens // rows))
    size = min(rows, -(-tokens // (parts * 128)) * 128) or rows
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _add_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, part: slice, grads: tuple[torch.Tensor, ...]
) -> None:
    """Gradients of the chunk ``x`` from those of its logits; those of weight and bias are added up."""
    of_hidden, of_weight, of_bias = grads
    add = part.start > 0
    if of_hidden.numel():
        _product(grad, weight, out=of_hidden[part])
    if of_weight.numel():
        _product(grad.t(), x, out=of_weight, add=add)
    if of_bias.numel():
        own = grad.sum(0, dtype=of_bias.dtype)
        of_bias.copy_(of_bias + own if add else own)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
    """``out = a @ b``, or added to it, without rounding to a type narrower than ``out``'s."""
    if a.dtype != out.dtype and a.is_cuda:
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        return
    torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=1 if add else 0, out=out)


def _empty_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: Maybe, of_hidden: bool, of_weight: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of hidden states, weight and bias; nothing (no elements) for what needs none."""
    dtype = wide(hidden.dtype)
    none = (0,)
    return (
        hidden.new_empty(hidden.shape if of_hidden else none, dtype=dtype),
        weight.new_empty(weight.shape if of_weight else none, dtype=dtype),
        weight.new_empty(weight.shape[:1] if of_weight and bias is not None else none, dtype=dtype),
    )


def _fake_forward(
    hidden: torch.Tensor, weight: torch.Tensor, bias: Maybe, labels: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, ...]:
    of_hidden, of_weight = options[-2:]
    dtype = wide(hidden.dtype)
    grads = _empty_gradients(hidden, weight, bias, of_hidden, of_weight)
    return hidden.new_empty((), dtype=dtype), hidden.new_empty((), dtype=dtype), *grads


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    hidden, weight, bias, *_ = inputs
    ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
    ctx.wanted = (inputs[-2], inputs[-1], inputs[-1] and bias is not None)
    ctx.others = len(inputs) - 3
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _autograd(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    scale, of_hidden, *of_parameters = ctx.saved_tensors
    factor = grad * scale
    # What follows fuses with the first; the others are nodes of their own, which can write into a gradient bucket.
    grads = [(of_hidden * factor).to(ctx.dtypes[0]) if ctx.wanted[0] else None]
    for found, dtype, want in zip(of_parameters, ctx.dtypes[1:], ctx.wanted[1:], strict=True):
        grads.append(scaled(found, factor, dtype) if want else None)
    return (*grads, *(None,) * ctx.others)


chunked_cross_entropy = define(
    "chunked_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int ignore_index, bool mean, "
    "float inner, bool tanh, float outer, int rows, bool of_hidden, bool of_weight) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    backward=_autograd,
    setup_context=_setup,
    flops=lambda hidden, weight, *options, **_: (1 + sum(options[-2:])) * 2 * hidden[0] * hidden[1] * weight[0],
)


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: Maybe,
    labels: torch.Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    mean: bool,
    cap: tuple[float, bool, float],
    rows: int,
) -> torch.Tensor:
    """``cross_entropy(cap(linear(hidden, weight, bias)), labels)`` in ``dtype``, ``rows`` tokens at a time.

    Tokens may have any number of dimensions. Gradients are computed here, for what requires them.
    """
    needed = torch.is_grad_enabled()
    of_hidden = needed and hidden.requires_grad
    of_weight = needed and (weight.requires_grad or (bias is not None and bias.requires_grad))
    tokens = hidden.reshape(-1, hidden.shape[-1])
    loss, *_ = chunked_cross_entropy(
        tokens, weight, bias, labels.reshape(-1), ignore_index, mean, *cap, rows, of_hidden, of_weight
    )
    return loss.to(dtype)
