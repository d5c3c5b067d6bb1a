"""Groups of tokens are padded to what an implementation asks for, once, and what comes back is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import fxshard
from fxshard.fused.by_mxfp8 import MXFP8Experts
from fxshard.fused.by_torch import TorchExperts
from fxshard.fused.glu import CLAMPED_GEGLU
from fxshard.fused.padding import pad_groups, take_rows
from fxshard.precision.mxfp8 import COLUMNWISE, ROWWISE, quantize
from tests.fused import models
from tests.fused.reference import Problem, distances, expert_by_expert
from tests.fused.test_patterns import FORMS, inputs, run


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


@contextmanager
def asking_for_multiples_of_8() -> Iterator[list[str]]:
    """``torch`` then takes nothing else, and leaves rubbish behind the last group, as kernels do."""
    calls: list[str] = []
    product, weight_gradient = TorchExperts.product, TorchExperts.weight_gradient

    def check(offsets: Tensor, rows: int, what: str) -> None:
        calls.append(what)
        assert rows % 8 == 0 and not (offsets % 8).any(), f"{what} of groups that end at {offsets.tolist()}"

    def aligned_product(self: TorchExperts, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        check(offsets, x.shape[0], "product")
        out = product(self, x, weight, offsets)
        out[int(offsets[-1]) :] = torch.nan
        return out

    def aligned_gradient(self: TorchExperts, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
        check(offsets, a.shape[0], "weight gradient")
        return weight_gradient(self, a, b, offsets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchExperts, "alignment", 8)
        patch.setattr(TorchExperts, "product", aligned_product)
        patch.setattr(TorchExperts, "weight_gradient", aligned_gradient)
        yield calls


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
    with asking_for_multiples_of_8() as calls:
        compiled = fxshard.compile(copy.deepcopy(model), lowering="eager")
        mine = run(compiled, args, compiled)
    assert set(calls) == {"product", "weight gradient"}
    assert mine.keys() == reference.keys() and mine["output"].shape == reference["output"].shape
    assert max(distances(mine, reference).values()) < 1e-5
    # Tokens and routing weights in, the result out; in backward its gradient in, theirs out.
    moves = 2 if form == "gate and up separate" else 3
    forward, backward = (compiled.graphs[phase].graph for phase in ("forward", "backward"))
    assert count(forward, "pad_groups") == 1 and count(backward, "pad_groups") == 0
    assert count(forward, "take_rows") == count(backward, "take_rows") == moves


# -- MXFP8, whose weight gradients have blocks of 32 tokens ------------------------------------------------------------


class QuantizedProduct(torch.autograd.Function):
    """``x wᵀ``, each product with both operands quantized along what it sums over; one expert, no padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return rounded(x, ROWWISE) @ rounded(w, ROWWISE).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        grad_w = rounded(grad, COLUMNWISE).t() @ rounded(x, COLUMNWISE)
        return rounded(grad, ROWWISE) @ rounded(w, COLUMNWISE), grad_w


def rounded(value: Tensor, axis: int) -> Tensor:
    return quantize(value.contiguous(), axis).dequantize()


@pytest.mark.shows("G10")
def test_blocks_of_mxfp8_stay_within_an_expert() -> None:
    """The first expert's tokens are so small that a block shared with another's would round them to nothing."""
    counts = [5, 0, 40, 3]
    torch.manual_seed(0)
    model = models.Joined(4, 32, 32)
    x, weights = torch.randn(48, 32), torch.rand(48).requires_grad_()
    x[:5] *= 2.0**-12
    args = x.requires_grad_(), torch.tensor(counts).cumsum(0).int(), weights

    def expert(e: int, rows: Tensor, scales: Tensor) -> Tensor:
        gate, up = QuantizedProduct.apply(rows, model.gate_up[e]).chunk(2, -1)
        return QuantizedProduct.apply(F.silu(gate) * up * scales[:, None], model.down[e])

    def in_mxfp8(x: Tensor, _: Tensor, weights: Tensor) -> Tensor:
        parts = zip(range(4), x.split(counts), weights.split(counts), strict=True)
        return torch.cat([expert(e, rows, scales) for e, rows, scales in parts if len(rows)])

    reference = run(in_mxfp8, args, model)
    small = {name: reference[name][0].double() for name in ("gate_up", "down")}
    found = {}
    for alignment in (32, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MXFP8Experts, "alignment", alignment)
            compiled = fxshard.compile(copy.deepcopy(model), lowering="eager", experts="mxfp8")
            mine = run(compiled, args, compiled)
        found[alignment] = [
            float((mine[name][0] / value.norm() - value / value.norm()).norm()) for name, value in small.items()
        ]
        if alignment == 32:
            assert max(distances(mine, reference).values()) < 3e-3  # a sum in another order may round differently
    assert max(found[32]) < 3e-3
    assert min(found[1]) > 0.5
    (report,) = fxshard.explain(model, args, experts="mxfp8").fused
    assert "padded to multiples of 32 tokens per expert" in report.form
    with pytest.raises(fxshard.ConfigError, match="blocks of 32, which hidden size 16 and inner size 24 must fill"):
        fxshard.explain(models.Joined(4, 16, 24), inputs(args[1]), experts="mxfp8")
