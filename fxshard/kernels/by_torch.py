"""Experts with torch's own grouped GEMM and one kernel for the activation. Runs wherever torch does.

Products of bf16 on CUDA go to ``torch.nn.functional.grouped_mm``, which reads the offsets on the device. All else
is a loop over experts: on the CPU it is as fast as torch's grouped kernel, on CUDA it reads the offsets on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from fxshard.kernels import glu as formula
from fxshard.kernels.glu import Derivatives, Glu


@dataclass(frozen=True)
class Experts:
    """The weights of all experts, ``[experts, in, out]`` with any strides. ``up`` is None where ``gate`` holds both."""

    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Call:
    """One call of the operator, but for what flows through it."""

    offsets: torch.Tensor
    experts: Experts
    weights: torch.Tensor | None
    """A routing weight per token."""
    glu: Glu
    weighted_bias: bool
    """Whether routing weights scale the second bias, too."""


@dataclass(frozen=True)
class Gradients:
    """All that backward gives, of what is there. Weights' gradients lie as the weights do."""

    x: torch.Tensor
    gate: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    weights: torch.Tensor | None = None


class TorchExperts:
    """The implementation ``torch``; the others replace some of its steps."""

    alignment = 1
    """What the number of tokens of each expert must be a multiple of. Where it is not, the pass that puts the operator
    into a graph pads (``padding``)."""
    recomputes = False
    """Whether ``forward`` keeps nothing (its pre-activations are empty) and ``gradients``, which computes it again,
    stands for ``backward`` and all weight gradients."""

    takes_quantized = False
    """Whether graphs call it with weights in MXFP8, by the operators of ``te_mlp_op``, in place of the whole one."""

    takes_dense = False
    """Whether ``up`` is faster for the only expert there is, a dense MLP, than what the compiler makes of it."""

    # -- the two operators -------------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output and the pre-activations (joined and nothing, or gate and up)."""
        pre, pre_up, hidden = self.up(x, call)
        out = self.product(hidden, call.experts.down, call.offsets)
        if call.experts.down_bias is not None:
            out += bias_rows(call.experts.down_bias, call.offsets, out, call.weights if call.weighted_bias else None)
        return out, pre, pre_up

    def backward(
        self, grad: torch.Tensor, call: Call, pre: torch.Tensor, pre_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the input, the pre-activations and the routing weights, and the activation for the weights'."""
        experts, offsets = call.experts, call.offsets
        grad_hidden = self.product(grad, experts.down.mT, offsets)
        grad_pre, grad_up, hidden, grad_weights = self.differentiate(
            pre, pre_up if experts.up is not None else None, grad_hidden, call.weights, call.glu
        )
        grad_x = self.product(grad_pre, experts.gate.mT, offsets)
        if experts.up is not None:
            grad_x += self.product(grad_up, experts.up.mT, offsets)
        if experts.down_bias is not None and call.weights is not None and call.weighted_bias:
            grad_weights += bias_dot(experts.down_bias, offsets, grad).to(grad_weights.dtype)
        return grad_x, grad_pre, grad_up, hidden, grad_weights

    def gradients(self, grad: torch.Tensor, x: torch.Tensor, call: Call) -> Gradients:
        """Every gradient at once, from the input alone; for those that say ``recomputes``."""
        raise NotImplementedError(f"{type(self).__name__} says that it recomputes, and has no gradients()")

    # -- steps that other implementations replace --------------------------------------------------------------------

    def up(self, x: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """First product and activation: pre-activations and what the second product multiplies."""
        experts, offsets = call.experts, call.offsets
        pre = self._biased(self.product(x, experts.gate, offsets), experts.gate_bias, offsets)
        if experts.up is None:
            return pre, x.new_empty(0), self.activate(pre, None, call.weights, call.glu)
        pre_up = self._biased(self.product(x, experts.up, offsets), experts.up_bias, offsets)
        return pre, pre_up, self.activate(pre, pre_up, call.weights, call.glu)

    def product(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Each row of ``x`` times the matrix of its expert."""
        x = x.contiguous()
        if runs_grouped(x, weight):
            return F.grouped_mm(x, weight, offs=offsets.int())
        out = x.new_zeros(x.shape[0], weight.shape[-1])
        for expert, (begin, end) in enumerate(groups(offsets)):
            if begin < end:
                out[begin:end] = torch.mm(x[begin:end], weight[expert])
        return out

    def weight_gradient(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """``aᵀ b`` over the rows of each expert."""
        a, b = a.contiguous(), b.contiguous()
        if runs_grouped(a, b):
            return F.grouped_mm(a.t(), b, offs=offsets.int())
        out = a.new_zeros(offsets.shape[0], a.shape[1], b.shape[1])
        for expert, (begin, end) in enumerate(groups(offsets)):
            if begin < end:
                out[expert] = torch.mm(a[begin:end].t(), b[begin:end])
        return out

    def row_sum(self, a: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The sum of the rows of each expert: a bias's gradient."""
        ones = a.new_ones(a.shape[0], 8)  # the grouped kernel wants 16 bytes
        return self.weight_gradient(ones, a, offsets)[:, 0].contiguous()

    def activate(
        self, pre: torch.Tensor, pre_up: torch.Tensor | None, weights: torch.Tensor | None, glu: Glu
    ) -> torch.Tensor:
        kernels = _kernels(pre)
        if kernels is not None:
            return kernels.activate(pre, pre_up, weights, glu)
        gate, up = formula.split(pre, glu.interleave) if pre_up is None else (pre, pre_up)
        return formula.activate(gate, up, weights, glu)

    def differentiate(
        self, pre: torch.Tensor, pre_up: torch.Tensor | None, grad: torch.Tensor, weights: torch.Tensor | None, glu: Glu
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Back through the activation: gradients of the pre-activations, the activation, the routing weights'."""
        kernels = _kernels(pre)
        if kernels is not None:
            return kernels.differentiate(pre, pre_up, weights, grad, glu)
        gate, up = formula.split(pre, glu.interleave) if pre_up is None else (pre, pre_up)
        found: Derivatives = formula.differentiate(gate, up, weights, grad, glu)
        grad_weights = found.weights if found.weights is not None else pre.new_empty(0)
        if pre_up is None:
            return formula.join(found.gate, found.up, glu.interleave), pre.new_empty(0), found.hidden, grad_weights
        return found.gate, found.up, found.hidden, grad_weights

    def _biased(self, product: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor) -> torch.Tensor:
        return product if bias is None else product.add_(bias_rows(bias, offsets, product))


def bias_rows(
    bias: torch.Tensor, offsets: torch.Tensor, like: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The bias of the expert of each row of ``like``, times the row's routing weight where there is one.

    Nothing is read on the host.
    """
    positions = torch.arange(like.shape[0], device=offsets.device, dtype=offsets.dtype)
    experts = torch.searchsorted(offsets, positions, right=True).clamp_(max=offsets.shape[0] - 1)
    rows = bias[experts]
    return rows if weights is None else rows * weights.to(rows.dtype).unsqueeze(-1)


def bias_dot(bias: torch.Tensor, offsets: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """What a bias after the second product adds to the gradient of each routing weight, in float32."""
    return (grad.float() * bias_rows(bias, offsets, grad).float()).sum(-1)


def runs_grouped(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch's grouped kernel takes these: bf16 on CUDA, rows of a multiple of 16 bytes."""
    if a.device.type != "cuda" or a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        return False
    return all(size % 8 == 0 for size in (a.shape[-1], b.shape[-1], b.shape[-2] if b.ndim == 3 else 8))


def groups(offsets: torch.Tensor) -> list[tuple[int, int]]:
    """(first row, last row + 1) of each expert, read on the host."""
    return list(pairwise([0, *offsets.tolist()]))


def _kernels(tensor: torch.Tensor):  # type: ignore[no-untyped-def]
    """The activation as one Triton kernel, which torch for CUDA brings along."""
    if tensor.device.type != "cuda":
        return None
    from fxshard.kernels import activation_kernels

    return activation_kernels
