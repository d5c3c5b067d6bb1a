"""The parts of ``fxshard::grouped_swiglu`` as operators, for experts whose products are computed in another way."""

from __future__ import annotations

import torch

from fxshard.kernels.by_torch import TorchExperts, bias_dot, bias_rows
from fxshard.kernels.glu import Glu
from fxshard.kernels.ops import define

Maybe = torch.Tensor | None


def _activate(
    pre: torch.Tensor, up: Maybe, weights: Maybe, alpha: float, limit: float, offset: float, interleave: int
) -> torch.Tensor:
    return TorchExperts().activate(pre, up, weights, Glu(alpha, limit, offset, interleave))


def _differentiate(
    pre: torch.Tensor, up: Maybe, weights: Maybe, grad: torch.Tensor, alpha: float, limit: float, offset: float, n: int
) -> tuple[torch.Tensor, ...]:
    """Gradients of the pre-activations, the activation once more, gradients of the routing weights."""
    return TorchExperts().differentiate(pre, up, grad, weights, Glu(alpha, limit, offset, n))


def _fake_activate(pre: torch.Tensor, up: Maybe, *_: object) -> torch.Tensor:
    return torch.empty_like(pre) if up is not None else pre.new_empty(pre.shape[0], pre.shape[1] // 2)


def _fake_differentiate(
    pre: torch.Tensor, up: Maybe, weights: Maybe, grad: torch.Tensor, *_: object
) -> tuple[torch.Tensor, ...]:
    nothing = pre.new_empty(0)
    of_weights = nothing if weights is None else torch.empty_like(weights, memory_format=torch.contiguous_format)
    return torch.empty_like(pre), nothing if up is None else torch.empty_like(up), torch.empty_like(grad), of_weights


def _add_bias(a: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor, weights: Maybe) -> torch.Tensor:
    """``a`` plus the bias of each row's expert, times the row's routing weight where there is one."""
    return a + bias_rows(bias, offsets, a, weights)


def _bias_dot(a: torch.Tensor, grad: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """What a bias after the second product adds to the gradients ``a`` of the routing weights."""
    return a + bias_dot(bias, offsets, grad).to(a.dtype)


def _like_first(a: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(a)


_GLU = "float alpha, float limit, float offset, int interleave"

glu = define(f"glu(Tensor pre, Tensor? pre_up, Tensor? weights, {_GLU}) -> Tensor", _activate, _fake_activate)
glu_backward = define(
    f"glu_backward(Tensor pre, Tensor? pre_up, Tensor? weights, Tensor grad, {_GLU}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _differentiate,
    _fake_differentiate,
)
add_expert_bias = define(
    "add_expert_bias(Tensor a, Tensor bias, Tensor offsets, Tensor? weights) -> Tensor", _add_bias, _like_first
)
expert_bias_dot = define(
    "expert_bias_dot(Tensor a, Tensor grad, Tensor bias, Tensor offsets) -> Tensor", _bias_dot, _like_first
)
