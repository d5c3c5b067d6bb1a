"""Groups of tokens are padded to what an implementation asks for, once, and what comes back is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import fxshard
from fxshard.kernels.by_torch import TorchExperts
from fxshard.kernels.choose import add_implementation
from fxshard.kernels.glu import CLAMPED_GEGLU
from fxshard.kernels.padding import pad_groups, take_rows
from tests.fused import models
from tests.fused.reference import Problem, distances, expert_by_expert
from tests.fused.test_patterns import FORMS, OFFSETS, SIZES, inputs, run


@pytest.mark.shows("G10")
@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    alignment=st.sampled_from([2, 3, 8]),
    unused=st.integers(0, 3),
)
def test_padding_and_back(counts: list[int], alignment: int, unused: int) -> None:
    """Against lists: each group, zeros up to the multiple; rows behind the last group belong to nobody."""
    rows = sum(counts) + unused
    x = torch.arange(1.0, rows + 1).unsqueeze(-1).repeat(1, 2).requires_grad_()
    wanted: list[float] = []
    ends, number = [], 1.0
    for count in counts:
        wanted += [number + i for i in range(count)] + [0.0] * (-count % alignment)
        number += count
        ends.append(len(wanted))
    offsets = torch.tensor(counts).cumsum(0).int()
    padded_offsets, inside, places = pad_groups(offsets, rows, alignment)
    padded = take_rows(x, inside, places)
    assert padded_offsets.tolist() == ends and padded_offsets.dtype == offsets.dtype
    assert padded[: len(wanted), 0].tolist() == wanted
    assert padded.shape[0] % alignment == 0 and not padded[len(wanted) :].any()
    back = take_rows(padded, places, inside)
    assert torch.equal(back[: sum(counts)], x[: sum(counts)]) and not back[sum(counts) :].any()
    weight = torch.rand(padded.shape)
    (grad,) = torch.autograd.grad((padded * weight).sum(), x)
    assert torch.equal(grad, take_rows(weight, places, inside))


# -- what implementations are given ------------------------------------------------------------------------------------

COUNTS = [5, 0, 7, 8]


CALLS: list[str] = []


class Strict(TorchExperts):
    """Takes multiples of 8 and nothing else, and leaves rubbish behind the last group, as kernels do."""

    alignment = 8

    def product(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        self.check(offsets, x.shape[0], "product")
        out = super().product(x, weight, offsets)
        out[int(offsets[-1]) :] = torch.nan
        return out

    def weight_gradient(self, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
        self.check(offsets, a.shape[0], "weight gradient")
        return super().weight_gradient(a, b, offsets)

    def check(self, offsets: Tensor, rows: int, what: str) -> None:
        CALLS.append(what)
        assert rows % 8 == 0 and not (offsets % 8).any(), f"{what} of groups that end at {offsets.tolist()}"


add_implementation("strict", Strict, lambda case: "they are not float32" if case.dtype != torch.float32 else None)


def in_turn(model: Any) -> Callable[..., Tensor]:
    """The same model as experts one by one, in plain PyTorch on its parameters."""

    def forward(x: Tensor, _: Tensor, weights: Tensor) -> Tensor:
        if isinstance(model, models.Clamped):
            gate, up = model.gate_up[..., ::2], model.gate_up[..., 1::2]
            biases = torch.cat((model.gate_up_bias[..., ::2], model.gate_up_bias[..., 1::2]), -1), model.down_bias
            p = Problem(x, COUNTS, torch.cat((gate, up), -1).mT, model.down.mT, weights, *biases)
            return expert_by_expert(p, CLAMPED_GEGLU)
        if isinstance(model, models.Joined):
            return expert_by_expert(Problem(x, COUNTS, model.gate_up, model.down, weights))
        return expert_by_expert(Problem(x, COUNTS, torch.cat((model.w1, model.w3), 1), model.w2))

    return forward


def count(graph: fx.Graph, target: str) -> int:
    return sum(str(node.target).startswith(f"fxshard.{target}") for node in graph.nodes)


@pytest.mark.shows("G10")
@pytest.mark.parametrize("form", ["gate and up separate", "joined", "clamped, biased"])
def test_an_implementation_gets_the_alignment_it_asks_for(form: str) -> None:
    make, offsets, _ = FORMS[form]
    model, args = make(), inputs(offsets)
    reference = run(in_turn(model), args, model)
    CALLS.clear()
    compiled = fxshard.compile(copy.deepcopy(model), lowering="eager", experts="strict")
    mine = run(compiled, args, compiled)
    assert set(CALLS) == {"product", "weight gradient"}
    assert mine.keys() == reference.keys() and mine["output"].shape == reference["output"].shape
    assert max(distances(mine, reference).values()) < 1e-5
    # Tokens and routing weights in, the result out; in backward its gradient in, theirs out.
    moves = 2 if form == "gate and up separate" else 3
    forward, backward = (compiled.graphs[phase].graph for phase in ("forward", "backward"))
    assert count(forward, "pad_groups") == 1 and count(backward, "pad_groups") == 0
    assert count(forward, "take_rows") == count(backward, "take_rows") == moves


def test_an_implementation_of_ones_own_is_asked_for_by_name() -> None:
    model, args = models.Titan(*SIZES), inputs(OFFSETS)
    (found,) = fxshard.explain(model, args, experts="strict").fused
    assert found.implementation == "strict" and "padded to multiples of 8 tokens per expert" in found.form
    with pytest.raises(fxshard.ConfigError, match="cannot run these experts: they are not float32"):
        fxshard.explain(model.bfloat16(), inputs(OFFSETS, torch.bfloat16), experts="strict")
    with pytest.raises(fxshard.ConfigError, match="'torch' is taken"):
        add_implementation("torch", Strict)
