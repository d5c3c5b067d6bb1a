"""A dense gated MLP as one node forward: what experts' kernels do faster than the compiler, for a single expert.

That is the first product, which takes the activation along: pre-activations are written once and not read again until
backward. All other products of a step are no faster as grouped ones, so backward is made of ordinary ones. Schedules
place them, and their gradients are written where they stay. The activation is computed again in backward, in the pass
over pre-activations that is made there anyway: it is not saved. With gate and up apart, formulas are autograd's own:
nothing is rounded in another way than in the model as it is written.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
import torch.nn.functional as F

from fxshard.kernels.by_torch import Call, Experts
from fxshard.kernels.choose import implementation
from fxshard.kernels.glu import SWIGLU
from fxshard.kernels.glu_op import glu_backward
from fxshard.kernels.ops import define


def _forward(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    experts = Experts(_alone(gate), _alone(up) if up is not None else None, _alone(down))
    pre, pre_up, hidden = implementation(name).up(x, Call(ends, experts, None, SWIGLU, False))
    return hidden.mm(down.mT), pre, pre_up


def _alone(weight: torch.Tensor) -> torch.Tensor:
    """The matrix of a linear layer as that of the only expert, ``[1, in, out]``."""
    return weight.mT.unsqueeze(0)


def _fake_forward(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor, name: str) -> Any:
    rows = x.shape[0]
    pre_up = x.new_empty(rows, up.shape[0]) if up is not None else x.new_empty(0)
    return x.new_empty(rows, down.shape[0]), x.new_empty(rows, gate.shape[0]), pre_up


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, _ = inputs
    _, pre, pre_up = output
    ctx.save_for_backward(*tensors, pre, pre_up)
    ctx.mark_non_differentiable(pre, pre_up)


def _autograd(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    x, gate, up, down, pre, pre_up = ctx.saved_tensors
    # In this order nothing is cut between the elementwise steps, which the compiler makes one pass of: where gradients
    # begin to be written, and where those of the layer before this one in backward are reduced, a segment ends.
    of_hidden = grad.mm(down)
    if up is None:  # the compiler would make two passes of it: one of the columns of both halves, one of a half's
        of_pre, of_up, hidden, _ = glu_backward(pre, None, None, of_hidden, *astuple(SWIGLU))
    else:
        activated = F.silu(pre)
        hidden = activated * pre_up
        of_pre = torch.ops.aten.silu_backward(of_hidden * pre_up, pre)
        of_up = of_hidden * activated
    needs = ctx.needs_input_grad
    of_down = grad.t().mm(hidden) if needs[3] else None
    of_gate = of_pre.t().mm(x) if needs[1] else None
    of_second = of_up.t().mm(x) if up is not None and needs[2] else None
    of_x = of_pre.mm(gate) if needs[0] else None
    if of_x is not None and up is not None:
        of_x = of_x + of_up.mm(up)
    return of_x, of_gate, of_second, of_down, None


dense_swiglu = define(
    "dense_swiglu(Tensor x, Tensor gate, Tensor? up, Tensor down, str implementation) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    backward=_autograd,
    setup_context=_setup,
    flops=lambda x, *weights, **_: sum(2 * x[0] * w[0] * w[1] for w in weights[:3] if w is not None),
    compiled_ahead=True,
)


def dense_mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor, name: str
) -> torch.Tensor:
    """``down(silu(gate(x)) · up(x))`` for weights as ``nn.Linear`` has them; without ``up``, ``gate`` holds both."""
    out, _, _ = dense_swiglu(x.reshape(-1, x.shape[-1]), gate, up, down, name)
    return out.view(*x.shape[:-1], out.shape[-1])
