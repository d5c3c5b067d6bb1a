"""The operator equals experts one by one, in its output and in every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fxshard.kernels import choose
from fxshard.kernels.by_torch import Call, Gradients, TorchExperts
from fxshard.kernels.glu import CLAMPED_GEGLU, SWIGLU, Glu, deinterleave_glu, interleave_glu
from fxshard.kernels.op import grouped_product, grouped_swiglu, grouped_swiglu_gradients, grouped_wgrad
from fxshard.kernels.padding import pad_groups, take_rows
from tests.fused.reference import distances, expert_by_expert, fused, problem, result_and_gradients

UNEVEN = [5, 0, 9, 3]


@pytest.mark.shows("G3", "G4", "G5")
@pytest.mark.parametrize("glu", [SWIGLU, CLAMPED_GEGLU], ids=["swiglu", "geglu"])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("counts", [UNEVEN, [0, 0, 17, 0]], ids=["an empty expert", "all on one"])
def test_equals_experts_one_by_one(glu: Glu, separate: bool, biased: bool, counts: list[int]) -> None:
    p = problem(counts, biased=biased, scale=6.0)  # large enough for the clamps to matter
    reference = result_and_gradients(p, expert_by_expert(p, glu))
    mine = result_and_gradients(p, fused(p, glu, separate=separate))
    assert max(distances(mine, reference).values()) < 2e-6
    if 0 in counts:
        assert not mine["down"][counts.index(0)].any()


@pytest.mark.shows("G5")
def test_a_bias_the_routing_weight_does_not_scale() -> None:
    p = problem(UNEVEN, biased=True)
    reference = result_and_gradients(p, expert_by_expert(p, weighted_bias=False))
    assert max(distances(result_and_gradients(p, fused(p, weighted_bias=False)), reference).values()) < 2e-6


@pytest.mark.shows("G3")
@pytest.mark.parametrize("weighted", [False, True])
def test_bf16_is_within_rounding(weighted: bool) -> None:
    """Not farther from the exact result than plain bf16 PyTorch is."""
    p = problem(UNEVEN, weighted=weighted, dtype=torch.bfloat16)
    exact = problem(UNEVEN, weighted=weighted)
    for name, value in exact.tensors().items():
        value.data = p.tensors()[name].detach().float()
    reference = result_and_gradients(exact, expert_by_expert(exact))
    mine = distances(result_and_gradients(p, fused(p)), reference)
    plain = distances(result_and_gradients(p, expert_by_expert(p)), reference)
    assert all(mine[name] < max(1.1 * plain[name], 4e-3) for name in mine), (mine, plain)


@pytest.mark.shows("G6")
@settings(max_examples=25)
@given(blocks=st.integers(1, 4), size=st.sampled_from([1, 2, 32]), dim=st.sampled_from([0, 1]))
def test_interleaving_is_exact_both_ways(blocks: int, size: int, dim: int) -> None:
    weight = torch.randn(2 * blocks * size, 2 * blocks * size)
    there = interleave_glu(weight, size, dim)
    assert torch.equal(deinterleave_glu(there, size, dim), weight)
    assert torch.equal(interleave_glu(deinterleave_glu(weight, size, dim), size, dim), weight)
    rows = there.movedim(dim, 0)
    assert torch.equal(rows[:size], weight.movedim(dim, 0)[:size])  # the first block is of the gate
    assert torch.equal(rows[size : 2 * size], weight.movedim(dim, 0)[blocks * size :][:size])  # the second of up


@pytest.mark.shows("G6")
@pytest.mark.parametrize("size", [1, 32])
def test_an_interleaved_projection_gives_the_same(size: int) -> None:
    p = problem(UNEVEN, inner=64, biased=True)
    reference = result_and_gradients(p, fused(p))
    alternating = replace(
        p,
        gate_up=interleave_glu(p.gate_up.detach(), size, 1).requires_grad_(),
        gate_up_bias=interleave_glu(p.gate_up_bias.detach(), size).requires_grad_(),
    )
    mine = result_and_gradients(alternating, fused(alternating, replace(SWIGLU, interleave=size)))
    mine["gate_up"] = deinterleave_glu(mine["gate_up"], size, 1)
    mine["gate_up_bias"] = deinterleave_glu(mine["gate_up_bias"], size)
    assert max(distances(mine, reference).values()) < 1e-6  # a product may add in another order


def test_operators_keep_torchs_rules() -> None:
    """Schema, fake kernels and autograd registration, checked by torch."""
    p = problem(UNEVEN, biased=True)
    args = (p.x, p.offsets, p.gate_up.mT, None, p.down.mT, p.gate_up_bias, None, p.down_bias, p.weights)
    torch.library.opcheck(grouped_swiglu, (*args, 1.0, float("inf"), 0.0, 0, True, "torch"))
    rules = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(grouped_product, (p.x, p.gate_up.mT, p.offsets, "torch"), test_utils=rules)
    torch.library.opcheck(grouped_wgrad, (p.x.detach(), p.x.detach(), p.offsets, "torch"), test_utils=rules)
    _, inside, places = pad_groups(p.offsets, p.x.shape[0], 8)
    torch.library.opcheck(pad_groups, (p.offsets, p.x.shape[0], 8), test_utils=rules)
    torch.library.opcheck(take_rows, (p.x, inside, places), test_utils=rules)


class Again(TorchExperts):
    """An implementation that keeps nothing for backward."""

    recomputes = True

    def forward(self, x: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super().forward(x, call)[0], x.new_empty(0), x.new_empty(0)

    def gradients(self, grad: torch.Tensor, x: torch.Tensor, call: Call) -> Gradients:
        _, pre, pre_up = super().forward(x, call)
        grad_x, grad_pre, _, hidden, weights = self.backward(grad, call, pre, pre_up)
        gate, down = (self.weight_gradient(a, b, call.offsets) for a, b in ((grad_pre, x), (grad, hidden)))
        return Gradients(grad_x, gate.mT, down.mT, weights=weights)


def test_an_implementation_that_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choose._MAKE, "again", Again)
    p = problem(UNEVEN)
    with FlopCounterMode(display=False) as counter:
        mine = result_and_gradients(p, fused(p, implementation="again"))
    assert counter.get_total_flops() == (1 + 3) * 3 * 2 * sum(UNEVEN) * 16 * 32
    assert max(distances(mine, result_and_gradients(p, fused(p))).values()) < 1e-6
    flat = [None if each is None else each.detach() for each in (p.gate_up.mT, None, p.down.mT, None, None, None)]
    args = (torch.ones_like(p.x), p.x.detach(), p.offsets, *flat, p.weights.detach(), 1.0, float("inf"), 0.0, 0, True)  # type: ignore[union-attr]
    rules = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(grouped_swiglu_gradients, (*args, "again"), test_utils=rules)


def test_a_gradient_lies_as_its_parameter_does() -> None:
    p = problem(UNEVEN)
    result_and_gradients(p, fused(p))
    assert p.gate_up.grad.is_contiguous() and p.down.grad.is_contiguous()


def test_operations_are_counted() -> None:
    p = problem(UNEVEN)
    with FlopCounterMode(display=False) as counter:
        fused(p).sum().backward()
    tokens, hidden, inner = sum(UNEVEN), 16, 32
    assert counter.get_total_flops() == 3 * 3 * 2 * tokens * hidden * inner
