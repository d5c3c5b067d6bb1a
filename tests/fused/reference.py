"""Experts one by one, in plain differentiable PyTorch: what the fused operator must equal."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from fxshard.kernels.glu import SWIGLU, Glu, interleave_glu
from fxshard.kernels.op import grouped_swiglu


@dataclass
class Problem:
    """One call: tokens sorted by expert, weights as ``nn.Linear`` has them, ``[experts, out, in]``, halves joined."""

    x: torch.Tensor
    counts: list[int]
    gate_up: torch.Tensor
    down: torch.Tensor
    weights: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def offsets(self) -> torch.Tensor:
        return torch.tensor(self.counts, device=self.x.device).cumsum(0).int()

    def tensors(self) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def problem(
    counts: list[int],
    *,
    hidden: int = 16,
    inner: int = 32,
    weighted: bool = True,
    biased: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    scale: float = 1.0,
) -> Problem:
    torch.manual_seed(0)
    experts, tokens = len(counts), sum(counts)

    def leaf(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape) * std).to(dtype).to(device).requires_grad_()

    return Problem(
        leaf(tokens, hidden, std=scale),
        counts,
        leaf(experts, 2 * inner, hidden, std=hidden**-0.5),
        leaf(experts, hidden, inner, std=inner**-0.5),
        torch.rand(tokens).to(dtype).to(device).requires_grad_() if weighted else None,
        leaf(experts, 2 * inner, std=0.5) if biased else None,
        leaf(experts, hidden, std=0.5) if biased else None,
    )


def expert_by_expert(p: Problem, glu: Glu = SWIGLU, *, weighted_bias: bool = True) -> torch.Tensor:
    """The definition, written without anything of ``fxshard.fused``. Gate and up are halves of the first projection."""
    parts, begin = [], 0
    for e, count in enumerate(p.counts):
        rows = slice(begin, begin + count)
        begin += count
        pre = p.x[rows] @ p.gate_up[e].t()
        if p.gate_up_bias is not None:
            pre = pre + p.gate_up_bias[e]
        inner = pre.shape[1] // 2
        gate, up = pre[:, :inner], pre[:, inner:]
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
        y = (gate * torch.sigmoid(glu.alpha * gate) * (up + glu.offset)) @ p.down[e].t()
        if weighted_bias:
            y = y + p.down_bias[e] if p.down_bias is not None else y
            y = y * p.weights[rows, None] if p.weights is not None else y
        else:
            y = y * p.weights[rows, None] if p.weights is not None else y
            y = y + p.down_bias[e] if p.down_bias is not None else y
        parts.append(y)
    return torch.cat(parts)


def fused(
    p: Problem,
    glu: Glu = SWIGLU,
    *,
    weighted_bias: bool = True,
    separate: bool = False,
    implementation: str = "torch",
) -> torch.Tensor:
    """The same through the operator; ``separate`` gives it gate and up as two weights."""
    gate, up = p.gate_up.mT, None
    gate_bias, up_bias = p.gate_up_bias, None
    if separate:
        gate, up = (half.mT for half in p.gate_up.chunk(2, 1))
        gate_bias, up_bias = p.gate_up_bias.chunk(2, 1) if p.gate_up_bias is not None else (None, None)
    return grouped_swiglu(
        *(p.x, p.offsets, gate, up, p.down.mT, gate_bias, up_bias, p.down_bias, p.weights),
        *(glu.alpha, glu.limit, glu.offset, glu.interleave, weighted_bias, implementation),
    )[0]


def result_and_gradients(p: Problem, out: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and the gradient of everything, for an upstream gradient that no symmetry helps."""
    for value in p.tensors().values():
        value.grad = None
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    out.backward(upstream)
    return {"output": out.detach(), **{name: value.grad for name, value in p.tensors().items()}}


def distances(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative differences, by name."""
    return {
        name: float(
            (mine[name].double() - theirs[name].double()).norm() / theirs[name].double().norm().clamp_min(1e-12)
        )
        for name in theirs
    }


def in_blocks(p: Problem) -> Problem:
    """The same with gate and up alternating every 32 columns."""
    bias = p.gate_up_bias
    return replace(
        p,
        gate_up=interleave_glu(p.gate_up.detach(), 32, 1).requires_grad_(),
        gate_up_bias=None if bias is None else interleave_glu(bias.detach(), 32).requires_grad_(),
    )
