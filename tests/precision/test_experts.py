"""Experts in MXFP8: every product against one expert after the other in plain PyTorch, alone and sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxshard
from fxshard.frontend.precision_report import report
from fxshard.kernels import glu as formula
from fxshard.kernels import mxfp8_grouped as grouped
from fxshard.kernels import mxfp8_products as products
from fxshard.kernels.mxfp8 import COLUMNWISE, ROWWISE, quantize
from fxshard.kernels.mxfp8_grouped import mxfp8_grouped_mm, mxfp8_grouped_wgrad, mxfp8_quantize_groups
from fxshard.kernels.mxfp8_ops import mxfp8_quantize
from fxshard.kernels.op import grouped_swiglu, grouped_swiglu_backward
from fxshard.passes import open_experts
from fxshard.schedule.events import Kind
from tests.fused.models import Joined, Loop, Titan
from tests.fused.reference import problem
from tests.pool import Pool
from tests.precision.nets import VOCAB
from tests.precision.test_gathers import run
from tests.precision.test_products import Reference, scaled_mm
from tests.thorough import thorough
from tests.training import Run

BF16 = torch.bfloat16
EXPERTS, DIM, INNER = 4, 32, 64
COUNTS = [5, 0, 70, 13]  # short blocks, none, and several
ENDS = torch.tensor(COUNTS).cumsum(0).int()


def of_expert(e: int) -> slice:
    return slice(sum(COUNTS[:e]), sum(COUNTS[: e + 1]))


@pytest.mark.shows("Q1")
def test_tokens_are_quantized_expert_by_expert() -> None:
    tokens = torch.randn(sum(COUNTS) + 3, DIM).to(BF16)  # rows behind the last offset belong to nobody
    tokens[-3:] = torch.nan
    data, scales = mxfp8_quantize_groups(tokens, ENDS)
    for e in range(EXPERTS):
        alone = quantize(tokens[of_expert(e)], COLUMNWISE)
        first = of_expert(e).start // 32 + e
        assert torch.equal(data.view(torch.uint8)[of_expert(e)], alone.data.view(torch.uint8))
        assert torch.equal(scales[first : first + len(alone.scales)], alone.scales)


def products_of(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Forward, input gradient and weight gradient through the operators; weights are ``[experts, out, in]``."""
    kept = [mxfp8_quantize(each, ROWWISE) for each in (x, dy)] + [mxfp8_quantize(w, axis) for axis in (ROWWISE, 0)]
    columns = [mxfp8_quantize_groups(each, ENDS) for each in (dy, x)]
    return [
        mxfp8_grouped_mm(*kept[0], *kept[2], ENDS, ROWWISE, torch.float32),
        mxfp8_grouped_mm(*kept[1], *kept[3], ENDS, COLUMNWISE, torch.float32),
        mxfp8_grouped_wgrad(*columns[0], *columns[1], ENDS, torch.float32),
    ]


def one_by_one(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    forward, backward, weights = [], [], []
    for e in range(EXPERTS):
        some, grad = x[of_expert(e)], dy[of_expert(e)]
        forward.append(quantize(some, ROWWISE).dequantize() @ quantize(w[e], ROWWISE).dequantize().t())
        backward.append(quantize(grad, ROWWISE).dequantize() @ quantize(w[e], COLUMNWISE).dequantize())
        weights.append(quantize(grad, COLUMNWISE).dequantize().t() @ quantize(some, COLUMNWISE).dequantize())
    return [torch.cat(forward), torch.cat(backward), torch.stack(weights)]


def test_the_three_products_equal_one_expert_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, w, dy = (torch.randn(*shape).to(BF16) for shape in ((88, DIM), (EXPERTS, INNER, DIM), (88, INNER)))
    expected = one_by_one(x, w, dy)
    for mine, theirs in zip(products_of(x, w, dy), expected, strict=True):
        assert torch.equal(mine, theirs)
    # The path of compute capability 10, with torch's GEMM replaced by one that checks its operands.
    for module in (products, grouped):
        monkeypatch.setattr(module, "scaled_products", lambda device: True)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    for mine, theirs in zip(products_of(x, w, dy), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("separate", [False, True])
def test_opened_experts_equal_the_fused_operator(separate: bool) -> None:
    """The nodes that ``open_experts`` puts in its place, run as they are: the same bits, biases included."""
    p = problem([3, 0, 6], hidden=8, inner=8, biased=True)
    gate, up = p.gate_up.mT, None
    bias, up_bias = p.gate_up_bias, None
    if separate:
        gate, up = (half.mT for half in p.gate_up.chunk(2, 1))
        assert bias is not None
        bias, up_bias = bias.chunk(2, 1)
    options = (1.702, 7.0, 1.0, 0, True, "torch")
    with torch.no_grad():
        args = (p.x, p.offsets, gate, up, p.down.mT, bias, up_bias, p.down_bias, p.weights, *options)
        fused = grouped_swiglu(*args)
        call: Callable[..., Any] = lambda target, *rest: target(*rest)  # noqa: E731
        for mine, theirs in zip(open_experts._forward(call, args), fused, strict=True):
            assert torch.equal(mine, theirs) if mine is not None else theirs.numel() == 0
        back = (torch.randn_like(fused[0]), p.offsets, gate, up, p.down.mT, p.down_bias, p.weights, *fused[1:])
        expected = grouped_swiglu_backward(*back, *options)
        for mine, theirs in zip(open_experts._backward(call, (*back, *options)), expected, strict=True):
            assert torch.equal(mine, theirs)


class Glu(torch.autograd.Function):
    """The activation with the derivative that the fused operator has."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return formula.activate(gate, up, None, formula.SWIGLU)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = formula.differentiate(*ctx.saved_tensors, None, grad, formula.SWIGLU)
        return found.gate, found.up


class Scaled(nn.Module):
    """Experts behind something that has a gradient, so that the input's counts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.experts = experts

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.experts(x * self.scale, offsets, torch.ones_like(x[:, 0])).float().square().mean()


def by_hand(model: Scaled, x: torch.Tensor, counts: list[int], glu: Callable[..., Any] = Glu.apply) -> torch.Tensor:
    """The same, one expert after the other, every product written out."""
    x, parts = x * model.scale, []
    for e, some in enumerate(x.split(counts)):
        gate, up, down = matrices(model.experts, e)
        hidden = glu(Reference.apply(some, gate), Reference.apply(some, up))
        parts.append(Reference.apply(hidden, down))
    return torch.cat(parts).float().square().mean()


def matrices(experts: nn.Module, e: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An expert's gate, up and down as ``[out, in]``."""
    if isinstance(experts, Joined):
        gate, up = experts.gate_up[e].chunk(2)
        return gate, up, experts.down[e]
    if isinstance(experts, Titan):
        gate, up, down = (w[e] if experts.transposed else w[e].t() for w in (experts.w1, experts.w3, experts.w2))
        return gate, up, down
    assert isinstance(experts, Loop)
    one = experts.experts[e]
    return one.gate.weight, one.up.weight, one.down.weight  # type: ignore[union-attr, return-value]


FORMS: dict[str, Callable[[], nn.Module]] = {
    "gate and up separate": lambda: Titan(EXPERTS, DIM, INNER),
    "stored as they multiply": lambda: Titan(EXPERTS, DIM, INNER, transposed=False),
    "a loop over linears": lambda: Loop(EXPERTS, DIM, INNER),
}


@pytest.mark.parametrize("form", [name if "loop" in name else thorough(name) for name in FORMS])
def test_gradients_equal_plain_autograd(form: str) -> None:
    torch.manual_seed(0)
    counts = COUNTS if "loop" not in form else [22] * 4
    x, offsets = torch.randn(sum(counts), DIM), torch.tensor(counts).cumsum(0).int()
    torch.manual_seed(1)
    reference = Scaled(FORMS[form]()).to(BF16)
    theirs = by_hand(reference, x.to(BF16), counts)
    theirs.backward()
    for gather in ("off", "auto"):
        torch.manual_seed(1)
        model = fxshard.compile(Scaled(FORMS[form]()), zero=3, precision=fxshard.MXFP8(gather=gather), lowering="eager")
        mine = model(x, offsets)
        mine.backward()
        assert torch.equal(mine, theirs)
        for name, parameter in model.named_parameters():
            expected = reference.get_parameter(name).grad
            assert parameter.grad is not None and expected is not None
            assert torch.equal(parameter.grad.to(BF16), expected), name
    with torch.no_grad():
        assert torch.equal(model(x, offsets), mine)  # what rests quantized, in an evaluation
    targets = {str(node.target) for graph in model.graphs.values() for node in graph.graph.nodes}
    assert {"fxshard.mxfp8_grouped_mm.default", "fxshard.mxfp8_grouped_wgrad.default"} <= targets
    assert not targets & {"fxshard.grouped_product.default", "fxshard.grouped_swiglu.default", "aten.mm.default"}
    stacked = "loop" not in form
    assert (
        "experts    dequantize and multiply in float32, one expert after the other" in str(report(model))
    ) == stacked


def test_products_of_experts_that_are_not_fused() -> None:
    """Torch's own grouped product and the two of its backward; the activation is the model's."""
    torch.manual_seed(0)
    x, net = torch.randn(sum(COUNTS), DIM), Scaled(Titan(EXPERTS, DIM, INNER))
    reference = copy.deepcopy(net).to(BF16)
    by_hand(reference, x.to(BF16), COUNTS, lambda gate, up: F.silu(gate) * up).backward()
    model = fxshard.compile(net, precision=fxshard.MXFP8(), lowering="eager", experts="off")
    model(x, ENDS).backward()
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).grad
        assert parameter.grad is not None and expected is not None
        assert torch.equal(parameter.grad.to(BF16), expected), name
    targets = [str(node.target) for graph in model.graphs.values() for node in graph.graph.nodes]
    assert not any("aten._grouped_mm" in target or "swiglu" in target for target in targets)
    assert targets.count("fxshard.mxfp8_grouped_mm.default") == 6
    assert targets.count("fxshard.mxfp8_grouped_wgrad.default") == 3


class MoeNet(nn.Module):
    """A language model whose tokens choose their experts by what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Joined(EXPERTS, DIM, INNER)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, ids = self.emb(x).flatten(0, 1), x.flatten() % EXPERTS
        order, offsets = ids.argsort(stable=True), F.one_hot(ids, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        for layer in self.layers:
            some = hidden[order]
            weights = torch.sigmoid(some.float().mean(-1)).to(some.dtype)
            hidden = hidden.index_add(0, order, layer(some, offsets, weights))
        return F.cross_entropy(self.head(hidden).float(), y.flatten())


def moe() -> nn.Module:
    torch.manual_seed(0)
    return MoeNet()


def sharded(zero: int) -> tuple[Run, Run]:
    ahead = {"prefetch": 4} if zero == 3 else {}
    return run(zero, "off", steps=3, make=moe), run(zero, "auto", steps=3, make=moe, **ahead)


@pytest.mark.shows("Q4")
@pytest.mark.parametrize("zero", [thorough(2), 3])
def test_gathering_quantized_experts_changes_nothing(ranks: Pool, zero: int) -> None:
    for off, on in ranks(2, sharded, zero):
        assert on.same(off)
        assert len(set(on.losses)) == 3


@pytest.mark.shows("Q9")
def test_experts_travel_quantized() -> None:
    """Direct gathers of stacks, of as many bytes as their copies have; boundaries fall between experts."""
    x = torch.zeros(2, 16, dtype=torch.int64)
    schedule = fxshard.plan(moe(), (x, x), world_size=2, zero=3, precision=fxshard.MXFP8(), lowering="eager")
    gathers = [e for _, e in schedule.of(Kind.UNSHARD) if schedule.buckets[e.bucket_index].quantized]
    assert {event.copies.value for event in gathers} == {"rowwise", "columnwise"}
    numel = EXPERTS * (2 * INNER * DIM + DIM * INNER)
    assert {event.bytes for event in gathers} == {numel * 33 // 32}
    schedule.verify()
