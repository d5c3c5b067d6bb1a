"""Experts in float8: products against one expert after the other, and training against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard._torch.errors import ConfigError, PassError
from fxshard.frontend.precision_report import report
from fxshard.kernels import float8
from fxshard.kernels.float8 import E4M3, Scaling
from fxshard.kernels.float8_grouped import float8_grouped_mm, float8_quantize_stack, float8_stack
from fxshard.kernels.float8_ops import float8_quantize
from tests.fused.models import Loop, Titan
from tests.pool import Pool
from tests.precision import float8_reference as reference
from tests.precision.test_experts import COUNTS, DIM, ENDS, EXPERTS, INNER, Glu, Scaled, matrices, of_expert
from tests.thorough import thorough
from tests.training import full_gradients

BF16 = torch.bfloat16


def rows(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = float8.scales_of(float8.largest_of(value, Scaling.ROW, 1), E4M3)
    return float8.cast(value, scales, E4M3), scales


def kept(value: torch.Tensor, axis: int) -> torch.Tensor:
    return reference.quantized(value, reference.tiles("row", value.shape, axis, True), E4M3)


@pytest.mark.shows("F1")
def test_products_equal_one_expert_after_the_other() -> None:
    torch.manual_seed(0)
    x, w, dy = (torch.randn(*shape).to(BF16) for shape in ((88, DIM), (EXPERTS, INNER, DIM), (88, INNER)))
    w *= torch.logspace(-3, 3, EXPERTS)[:, None, None]
    forward = float8_grouped_mm(*rows(x), *float8_quantize_stack(w, 1), ENDS)
    backward = float8_grouped_mm(*rows(dy), *float8_quantize_stack(w, 0), ENDS)
    for e in range(EXPERTS):
        some, grad = kept(x[of_expert(e)], 1), kept(dy[of_expert(e)], 1)
        assert torch.equal(forward[of_expert(e)], (some @ kept(w[e], 1).t()).to(BF16))
        assert torch.equal(backward[of_expert(e)], (grad @ kept(w[e], 0)).to(BF16))


def by_hand(model: Scaled, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """One expert after the other, every product written out."""
    x, parts = x * model.scale, []
    for e, some in enumerate(x.split(counts)):
        gate, up, down = matrices(model.experts, e)
        hidden = Glu.apply(*(reference.Product.apply(some, w, "row", "bf16") for w in (gate, up)))
        parts.append(reference.Product.apply(hidden, down, "row", "bf16"))
    return torch.cat(parts).float().square().mean()


FORMS: dict[str, Callable[[], nn.Module]] = {
    "rows are outputs": lambda: Titan(EXPERTS, DIM, INNER),
    "rows are inputs": lambda: Titan(EXPERTS, DIM, INNER, transposed=False),
    "a loop over linears": lambda: Loop(EXPERTS, DIM, INNER),
}


def run(form: str, scaling: str, **options: Any) -> tuple[fxshard.ShardedModule, bool]:
    """A model, and whether loss and gradients are those of plain autograd."""
    torch.manual_seed(0)
    counts = COUNTS if "loop" not in form else [22] * EXPERTS
    x, ends = torch.randn(sum(counts), DIM), torch.tensor(counts).cumsum(0).int()
    torch.manual_seed(1)
    plain = Scaled(FORMS[form]()).to(BF16)
    theirs = by_hand(plain, x.to(BF16), counts)
    theirs.backward()
    torch.manual_seed(1)
    options = options or {"linears": (), "experts": ("experts.*",)}
    precision = fxshard.Float8(scaling=scaling, **options)
    model = fxshard.compile(Scaled(FORMS[form]()), zero=3, precision=precision, lowering="eager")
    mine = model(x, ends)
    mine.backward()
    same = torch.equal(mine, theirs)
    for name, grad in full_gradients(model).items():
        expected = plain.get_parameter(name).grad
        assert expected is not None
        same &= torch.equal(grad.to(BF16), expected)
    return model, same


@pytest.mark.shows("F1")
@pytest.mark.parametrize(
    ("form", "scaling"),
    [("rows are outputs", "tensor"), ("rows are inputs", "row"), thorough("rows are inputs", "block")],
)
def test_training_equals_plain_autograd(form: str, scaling: str) -> None:
    model, same = run(form, scaling)
    assert same
    targets = [str(node.target) for graph in model.graphs.values() for node in graph.graph.nodes]
    assert targets.count("fxshard.float8_grouped_mm.default") == 6
    assert targets.count("fxshard.grouped_wgrad.default") == 3  # in bf16
    shown = str(report(model))
    assert (
        "experts    dequantize and multiply in float32, one expert after the other; weight gradients in bf16" in shown
    )
    assert "gather     off: bf16 travels and is quantized where it is used: 3 weights" in shown


@pytest.mark.parametrize("gather", [thorough("bf16"), "fp8"])
def test_experts_that_are_linears(gather: str) -> None:
    model, same = run("a loop over linears", "row", smallest=0, gather=gather)
    assert same
    targets = [str(node.target) for graph in model.graphs.values() for node in graph.graph.nodes]
    assert targets.count("fxshard.float8_grouped_mm.default") == 6


def test_scales_of_tensors_and_columns_in_a_stack() -> None:
    weights = [torch.randn(INNER, DIM).to(BF16) * 10**e for e in range(3)]
    for axis in (0, 1):
        for scaling, copy in (("tensor", 1), ("row", axis)):
            parts = [float8_quantize(w, scaling, copy) for w in weights]
            data, scales = float8_stack([part[0] for part in parts], [part[1] for part in parts], axis)
            for e, part in enumerate(parts):
                whole = float8.dequantize(*part)
                assert torch.equal(float8.dequantize(data[e], scales[e, :, None]), whole if axis else whole.t())


def test_linears_of_experts_have_no_blocks() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Loop(2, 128, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends = torch.tensor([16, 32], dtype=torch.int32)
            return self.experts(x, ends, torch.ones_like(x[:, 0])).float().sum()

    model = fxshard.compile(Wide(), precision=fxshard.Float8(scaling="block", smallest=0), lowering="eager")
    with pytest.raises(PassError, match=r"linears of experts, which multiply with scales of rows"):
        model(torch.randn(32, 128))


def same_on_ranks() -> bool:
    return run("rows are outputs", "tensor")[1]


@pytest.mark.shows("F7")
def test_on_two_ranks(ranks: Pool) -> None:
    """Both have the same tokens, so their mean gradients are those of one."""
    assert all(ranks(2, same_on_ranks))


class Both(nn.Module):
    """A linear and experts that read the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(DIM, DIM, bias=False)
        self.experts = Titan(EXPERTS, DIM, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.shared(x) + self.experts(x, ENDS, torch.ones_like(x[:, 0]))).float().square().mean()


def test_a_linear_beside_experts_has_its_own_scales() -> None:
    torch.manual_seed(0)
    x, net = torch.randn(sum(COUNTS), DIM), Both()
    x[::7] *= 100.0
    precision = fxshard.Float8(smallest=0, experts=("*",))
    model = fxshard.compile(net, zero=3, precision=precision, lowering="eager")
    with torch.no_grad():
        tokens, w = x.to(BF16), model.full_state_dict()
        linear = reference.Product.apply(tokens, w["shared.weight"].to(BF16), "tensor", "fp8")
        parts = []
        for e in range(EXPERTS):
            gate, up, down = (w[f"experts.{name}"][e].to(BF16) for name in ("w1", "w3", "w2"))
            hidden = Glu.apply(*(reference.Product.apply(tokens[of_expert(e)], m, "row", "bf16") for m in (gate, up)))
            parts.append(reference.Product.apply(hidden, down, "row", "bf16"))
        assert torch.equal(model(x), (linear + torch.cat(parts)).float().square().mean())
    kinds = {(plan.float8 is not None, str(plan.gather)) for plan in model._sharding.plans}
    assert len(kinds) == 2 and all(float8 for float8, _ in kinds)


def test_experts_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"names 'experts.w1', which cannot be quantized: .* 16 does not divide both"):
        fxshard.compile(Scaled(Titan(2, DIM, 24)), precision=fxshard.Float8(linears=(), experts=("experts.w1",)))
