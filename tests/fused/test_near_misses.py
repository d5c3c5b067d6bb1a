"""What only looks like experts is left alone, bit for bit, and the report says why."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard
from tests.fused.models import Joined, Loop, Mlp, Titan, product
from tests.fused.test_patterns import DIM, INNER, OFFSETS, SIZES, inputs, run


class Written(Titan):
    """Stacked experts whose middle part is given."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__(*SIZES)
        self.between = between

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        gate, up = product(x, self.w1.mT, offsets), product(x, self.w3.mT, offsets)
        return product(self.between(gate, up), self.w2.mT, offsets)


class Swapped(Joined):
    def parts(self, h: Tensor) -> tuple[Tensor, Tensor]:
        up, gate = h.chunk(2, dim=-1)
        return gate, up


class UsedElsewhere(Titan):
    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        gate = product(x, self.w1.mT, offsets)
        h = F.silu(gate) * product(x, self.w3.mT, offsets)
        return product(h, self.w2.mT, offsets) + gate.sum()


class OtherOffsets(Titan):
    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        h = F.silu(product(x, self.w1.mT, offsets)) * product(x, self.w3.mT, offsets)
        return product(h, self.w2.mT, offsets + 0)


class OtherInputs(Titan):
    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        h = F.silu(product(x, self.w1.mT, offsets)) * product(x.tanh(), self.w3.mT, offsets)
        return product(h, self.w2.mT, offsets)


class ChangedInPlace(Titan):
    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        gate, up = product(x, self.w1.mT, offsets), product(x, self.w3.mT, offsets)
        h = up * 2
        up.mul_(3)
        return product(F.silu(gate) * up, self.w2.mT, offsets) + h.sum()


class Unlike(Loop):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.experts[1] = Mlp(DIM, 2 * INNER)


class Disordered(Loop):
    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        parts = x.chunk(len(self.experts), dim=0)[::-1]
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


MISSES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gelu": (lambda: Written(lambda g, u: F.gelu(g) * u), "the activation is gelu, not SiLU"),
    "no gate": (lambda: Written(lambda g, u: F.silu(g + u)), "nothing is multiplied"),
    "tanh": (lambda: Written(lambda g, u: g.tanh() * u), "no gated SiLU"),
    "sigmoid of another": (lambda: Written(lambda g, u: g * torch.sigmoid(u) * g), "no gated SiLU"),
    "a factor from between": (
        lambda: Written(lambda g, u: F.silu(g) * u * g.mean(-1, keepdim=True)),
        "depends on what lies",
    ),
    "clamped differently": (lambda: Written(lambda g, u: F.silu(g.clamp(max=7.0)) * u), "clamped differently"),
    "clamped below": (
        lambda: Written(lambda g, u: F.silu(g.clamp(-7.0, 7.0)) * u),
        r"gate is clamped to \[-7.0, 7.0\]",
    ),
    "gate second": (lambda: Swapped(*SIZES), "gate is not the first half"),
    "used elsewhere": (lambda: UsedElsewhere(*SIZES), "returned by the model|used elsewhere"),
    "other offsets": (lambda: OtherOffsets(*SIZES), "different offsets"),
    "other inputs": (lambda: OtherInputs(*SIZES), "different inputs"),
    "changed in place": (lambda: ChangedInPlace(*SIZES), "in place|returned by the model"),
    "experts of two sizes": (lambda: Unlike(*SIZES), "differ in shape or activation"),
    "experts in another order": (lambda: Disordered(*SIZES), "not consecutive parts"),
}


@pytest.mark.shows("G2")
@pytest.mark.parametrize("kind", MISSES)
def test_a_near_miss_is_left_alone_and_reported(kind: str) -> None:
    make, reason = MISSES[kind]
    model: Any = make()
    args = inputs(OFFSETS)
    report = fxshard.explain(model, args)
    assert not report.fused
    assert any(re.search(reason, left.reason) for left in report.left), report
    reference = run(model, args, model)
    compiled = fxshard.compile(copy.deepcopy(model), lowering="eager")
    mine = run(compiled, args, compiled)
    assert "grouped_swiglu" not in str(compiled.graphs["forward"].graph)
    assert mine.keys() == reference.keys()
    assert all(torch.equal(mine[name], reference[name]) for name in reference)


@pytest.mark.shows("G2")
def test_a_routing_weight_that_widens_the_result_stays_outside() -> None:
    class Wide(Titan):
        def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
            return super().forward(x, offsets, weights) * weights.float()[:, None]

    model = Wide(*SIZES).bfloat16()
    args = inputs(OFFSETS, torch.bfloat16)
    (found,) = fxshard.explain(model, args).fused
    assert "routing weight outside" in found.form
    assert fxshard.compile(model, lowering="eager")(*args).dtype == torch.float32


def test_reports_read_well() -> None:
    dense = nn.Sequential(Mlp(DIM, INNER), Mlp(DIM, INNER))
    assert str(fxshard.explain(dense, (torch.randn(3, DIM),))).startswith(
        "0.down and 1 more left alone: a dense gated MLP"
    )
    assert str(fxshard.explain(nn.Linear(2, 2), (torch.randn(3, 2),))).startswith("no experts found")
