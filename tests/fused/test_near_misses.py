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
from tests.fused.test_patterns import DIM, EXPERTS, INNER, OFFSETS, SIZES, inputs, rewritten, run


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


class ChangedThroughAView(Joined):
    def parts(self, h: Tensor) -> tuple[Tensor, Tensor]:
        h[:, :INNER].mul_(2)
        return super().parts(h)


class LowRank(Joined):
    """Something is added to the product that is no bias, as adapters do."""

    def parts(self, h: Tensor) -> tuple[Tensor, Tensor]:
        h.add_(self.gate_up[0, :, 0])
        return super().parts(h)


class ChangedBetween(Titan):
    """Gate and up project one tensor, in two states."""

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        x = x * 1
        gate = product(x, self.w1.mT, offsets)
        x[:3].zero_()
        return product(F.silu(gate) * product(x, self.w3.mT, offsets), self.w2.mT, offsets)


class Watched(Titan):
    """A buffer keeps track of what lies between."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        gate = product(x, self.w1.mT, offsets)
        self.seen.add_(gate.detach().abs().sum())
        return product(F.silu(gate) * product(x, self.w3.mT, offsets), self.w2.mT, offsets)


class ByKeyword(Titan):
    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        h = F.silu(product(x, self.w1.mT, offsets)) * product(x, self.w3.mT, offsets)
        return product(torch.mul(h, other=weights[:, None]), self.w2.mT, offsets)


class Unlike(Loop):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.experts[1] = Mlp(DIM, 2 * INNER)


class Clamped(Loop):
    """Every expert clamps its gate and up."""

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        def expert(mlp: Any, part: Tensor) -> Tensor:
            gate, up = mlp.gate(part).clamp(max=7.0), mlp.up(part).clamp(-7.0, 7.0)
            return mlp.down(F.silu(gate) * up)

        parts = x.chunk(len(self.experts), dim=0)
        return torch.cat([expert(mlp, part) for mlp, part in zip(self.experts, parts, strict=True)])


class Disordered(Loop):
    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        parts = x.chunk(len(self.experts), dim=0)[::-1]
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


class Beside(Loop):
    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        parts = x.chunk(len(self.experts), dim=0)
        done = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        return torch.cat(tensors=done, dim=0).sum() + torch.concat(done, axis=1)


class Narrow(Loop):
    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, offsets, weights)


class WithoutGradients(Written):
    """Gate and up are constants to autograd."""

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = F.silu(product(x, self._w(self.w1), offsets)) * product(x, self._w(self.w3), offsets)
        return product(hidden, self._w(self.w2), offsets) + x


class OneWithoutGradients(Loop):
    """The first expert, or what it is given, is a constant to autograd."""

    def __init__(self, which: str) -> None:
        super().__init__(*SIZES)
        self.which = which

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.which != "input" and torch.is_grad_enabled()):
            parts = x.chunk(len(self.experts), dim=0)
        with torch.set_grad_enabled(self.which != "expert" and torch.is_grad_enabled()):
            first = self.experts[0](parts[0])
        others = zip(self.experts[1:], parts[1:], strict=True)
        return torch.cat([first, *(expert(part) for expert, part in others)])


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
    "rounded in between": (
        lambda: Written(lambda g, u: (F.silu(g) * u).to(torch.float8_e4m3fn).float()),
        "rounded to torch.float8_e4m3fn",
    ),
    "rounded as products are not": (
        lambda: Written(lambda g, u: (F.silu(g).bfloat16() * u.bfloat16()).float()),
        "rounded to torch.bfloat16",
    ),
    "without gradients": (lambda: WithoutGradients(lambda g, u: u), "gradients or autocast are switched"),
    "one expert without gradients": (lambda: OneWithoutGradients("expert"), "switched on or off between them"),
    "parts without gradients": (lambda: OneWithoutGradients("input"), "switched on or off between them"),
    "gate second": (lambda: Swapped(*SIZES), "gate is not the first half"),
    "used elsewhere": (lambda: UsedElsewhere(*SIZES), "returned by the model|has other uses"),
    "other offsets": (lambda: OtherOffsets(*SIZES), "different offsets"),
    "other inputs": (lambda: OtherInputs(*SIZES), "different inputs"),
    "changed in place": (lambda: ChangedInPlace(*SIZES), "in place|returned by the model"),
    "changed through a view": (lambda: ChangedThroughAView(*SIZES), "in place"),
    "added to in place": (lambda: LowRank(*SIZES), "changed in place"),
    "a buffer that watches": (lambda: Watched(*SIZES), "seen.* is changed in place"),
    "an operand by keyword": (lambda: ByKeyword(*SIZES), "nothing is multiplied"),
    "put together twice": (lambda: Beside(*SIZES), "dense gated MLP"),
    "autocast": (lambda: Narrow(*SIZES), "differ in type"),
    "experts of two sizes": (lambda: Unlike(*SIZES), "differ in shape or activation"),
    "clamped experts": (lambda: Clamped(*SIZES), "not plain SwiGLU"),
    "experts in another order": (lambda: Disordered(*SIZES), "not consecutive parts"),
}


@pytest.mark.shows("G2")
@pytest.mark.parametrize("kind", MISSES)
def test_a_near_miss_is_left_alone_and_reported(kind: str) -> None:
    make, reason = MISSES[kind]
    model: Any = make()
    args, before = inputs(OFFSETS), copy.deepcopy(model)
    reference = run(model, args, model)
    captured, report, calls = rewritten(before)
    mine = run(captured, args, before)
    assert not report.fused and not any("grouped_swiglu" in target for target in calls)
    assert any(re.search(reason, left.reason) for left in report.left), report
    assert mine.keys() == reference.keys()
    assert all(torch.equal(mine[name], reference[name]) for name in reference)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(before.buffers(), model.buffers(), strict=True))


@pytest.mark.shows("G2")
def test_an_input_that_changes_in_between() -> None:
    """Without gradients, for which autograd would refuse it."""
    model, args = ChangedBetween(*SIZES), inputs(OFFSETS)
    captured, report, _ = rewritten(model)
    with torch.no_grad():
        assert torch.equal(captured(*args), model(*args))
    (left,) = report.left
    assert "changed in place before the experts are done" in left.reason


class Rounded(Titan):
    """The experts get their input rounded."""

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x.bfloat16().float(), offsets, weights)


class RoundedForGate(Titan):
    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        gate = product(x.bfloat16().float(), self.w1.mT, offsets)
        return product(F.silu(gate) * product(x, self.w3.mT, offsets), self.w2.mT, offsets)


class CopiedAndChanged(Titan):
    """What the experts read is a copy, made by casts, of something that changes afterwards."""

    def __init__(self, which: str) -> None:
        super().__init__(*SIZES)
        self.which = which

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        x, scale = x * 1, weights[:, None] * 1
        for_gate, by = x.to(torch.float64).to(torch.float32), scale.to(torch.float64).to(torch.float32)
        for_up = for_gate
        if self.which == "x":
            x.mul_(2)
        if self.which == "between":
            x.mul_(2)
            for_up = x.to(torch.float64).to(torch.float32)
        if self.which == "weights":
            scale.mul_(2)
        gate, up = product(for_gate, self.w1.mT, offsets), product(for_up, self.w3.mT, offsets)
        return product(F.silu(gate) * up * by, self.w2.mT, offsets)


@pytest.mark.shows("G2")
@pytest.mark.parametrize(
    ("make", "fused"),
    [
        pytest.param(lambda: Rounded(*SIZES), True, id="rounded"),
        pytest.param(lambda: RoundedForGate(*SIZES), False, id="rounded for gate"),
        pytest.param(lambda: CopiedAndChanged("nothing"), True, id="copied"),
        pytest.param(lambda: CopiedAndChanged("x"), True, id="x changed behind its copy"),
        pytest.param(lambda: CopiedAndChanged("between"), False, id="x changed between two copies"),
        pytest.param(lambda: CopiedAndChanged("weights"), False, id="weights changed behind their copy"),
    ],
)
def test_a_cast_is_read_as_what_it_was_when_it_was_made(make: Callable[[], Titan], fused: bool) -> None:
    model, args = make(), inputs(OFFSETS)
    captured, report, _ = rewritten(model)
    with torch.no_grad():
        assert torch.allclose(captured(*args), model(*args), rtol=1e-5, atol=1e-6)
    assert bool(report.fused) == fused, report


@pytest.mark.shows("G2")
def test_a_routing_weight_that_widens_the_result_stays_outside() -> None:
    class Wide(Titan):
        def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
            return super().forward(x, offsets, weights) * weights.float()[:, None]

    model, args = Wide(*SIZES).bfloat16(), inputs(OFFSETS, torch.bfloat16)
    fused, report, _ = rewritten(model)
    assert fused(*args).dtype == torch.float32
    (found,) = report.fused
    assert "routing weight outside" in found.form


@pytest.mark.shows("G2", "G5")
def test_a_bias_that_widens_the_result_stays_outside() -> None:
    class Wide(Titan):
        def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
            counts = offsets.diff(prepend=offsets.new_zeros(1))
            bias = torch.ones(EXPERTS, DIM).repeat_interleave(counts, dim=0, output_size=x.shape[0])
            return super().forward(x, torch.cumsum(counts, dim=0, dtype=torch.int32), weights) + bias

    model, args = Wide(*SIZES).bfloat16(), inputs(OFFSETS, torch.bfloat16)
    fused, report, _ = rewritten(model)
    assert fused(*args).dtype == torch.float32
    (found,) = report.fused
    assert "biases" not in found.form


def test_reports_read_well() -> None:
    dense = nn.Sequential(Mlp(DIM, INNER), Mlp(DIM, INNER))
    assert str(fxshard.explain(dense, (torch.randn(3, DIM),))).startswith(
        "0.down and 1 more left alone: a dense gated MLP"
    )
    assert str(fxshard.explain(nn.Linear(2, 2), (torch.randn(3, 2),))).startswith("no experts found")
