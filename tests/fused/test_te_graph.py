"""Transformer Engine's fused grouped MLP in graphs: on the quantized weights, forward once, weight gradients apart.

On a stand-in (``te_fused_stand_in``), whose interface ``test_te_source`` compares with Transformer Engine's source.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.kernels import by_te, choose
from fxshard.kernels.glu import CLAMPED_GEGLU, SWIGLU, Glu, split
from fxshard.kernels.mxfp8 import COLUMNWISE, ROWWISE, quantize
from fxshard.kernels.mxfp8_ops import mxfp8_quantize
from fxshard.kernels.te_mlp import Form, fused_mlp
from fxshard.kernels.te_mlp_op import te_mlp_backward, te_mlp_forward, te_mlp_wgrad
from tests.fused import models
from tests.fused.reference import Problem, distances, in_blocks, problem, result_and_gradients
from tests.fused.te_fused_stand_in import GroupedMLP_CuTeGEMMGLU, OperationContext
from tests.fused.te_stand_in import Machine
from tests.pool import Pool
from tests.thorough import thorough

NAME = "te-mxfp8"
SIZES = (4, 64, 96)
COUNTS = [5, 0, 130, 3]
"""Tokens of each expert: none, and more than a tile."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine on which experts on a CPU pass for experts on a device of compute capability 10."""
    caches = (by_te.engine, choose.implementation, fused_mlp)
    for each in caches:
        each.cache_clear()
    machine = Machine(monkeypatch)
    monkeypatch.setitem(choose._REFUSALS, NAME, lambda case: None)
    machine.import_engine()
    yield machine
    for each in caches:
        each.cache_clear()


def rounded(value: Tensor, axis: int) -> Tensor:
    return quantize(value.detach(), axis).dequantize()


class Linear(torch.autograd.Function):
    """``x wᵀ`` in MXFP8: each product on operands that are rounded along what it sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return rounded(x, ROWWISE) @ rounded(w, ROWWISE).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        of_w = rounded(grad, COLUMNWISE).t() @ rounded(x, COLUMNWISE)
        return rounded(grad, ROWWISE) @ rounded(w, COLUMNWISE), of_w


def by_hand(p: Problem, glu: Glu = SWIGLU, *, weighted_bias: bool = False) -> Tensor:
    """Experts one by one, in plain PyTorch; gate and up alternate every 32 columns."""
    parts = []
    assert p.weights is not None
    for e, (rows, scale) in enumerate(zip(p.x.split(COUNTS), p.weights.split(COUNTS), strict=True)):
        pre = Linear.apply(rows, p.gate_up[e])
        gate, up = split(pre if p.gate_up_bias is None else pre + p.gate_up_bias[e], 32)
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
        hidden = gate * torch.sigmoid(glu.alpha * gate) * (up + glu.offset) * scale.unsqueeze(-1)
        out = Linear.apply(hidden, p.down[e])
        if p.down_bias is not None:
            out = out + p.down_bias[e] * (scale.unsqueeze(-1) if weighted_bias else 1)
        parts.append(out)
    return torch.cat(parts)


def as_bf16(value: Tensor) -> Tensor:
    return value.detach().bfloat16().float().requires_grad_()


def step(model: Any, args: tuple[Tensor, ...], parameters: nn.Module) -> dict[str, Tensor]:
    for leaf in (args[0], args[-1], *parameters.parameters()):
        leaf.grad = None
    out = model(*args)
    out.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in parameters.named_parameters()}
    return {"output": out.detach(), "x": args[0].grad, "weights": args[-1].grad, **grads}  # type: ignore[dict-item]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    p = problem(COUNTS, hidden=SIZES[1], inner=SIZES[2])
    assert p.weights is not None
    return p.x, p.offsets, p.weights


def targets(model: fxshard.ShardedModule, *phases: str) -> list[str]:
    nodes = [node for phase in phases for node in model.graphs[phase].graph.nodes]
    return [str(node.target).removeprefix("fxshard.").removesuffix(".default") for node in nodes]


@pytest.mark.shows("G7", "G10")
@pytest.mark.parametrize("lowering", ["eager", thorough("inductor")])
def test_a_step_is_mxfp8_products_expert_by_expert(here: Machine, lowering: str) -> None:
    torch.manual_seed(0)
    plain, args = models.Joined(*SIZES, "blocks of 32"), inputs()
    model = fxshard.compile(copy.deepcopy(plain), zero=3, lowering=lowering, experts=NAME)
    p = Problem(args[0], COUNTS, plain.gate_up, plain.down, args[2])
    expected = step(lambda *_: by_hand(p), args, plain)
    found = step(model, args, model)
    assert max(distances(found, expected).values()) < 1e-5
    away = distances(found, step(plain, args, plain))
    assert min(away.values()) > 1e-3 and max(away.values()) < 0.1  # it is MXFP8, and no more than that
    with torch.inference_mode():
        assert torch.equal(model(*args), found["output"])
    (report,) = fxshard.explain(plain, args, experts=NAME).fused
    assert report.implementation == NAME and report.form.endswith("padded to multiples of 128 tokens per expert")


def test_forward_runs_once_and_each_weight_gradient_is_a_node(here: Machine) -> None:
    model = fxshard.compile(models.Joined(*SIZES, "blocks of 32"), zero=3, lowering="eager", experts=NAME)
    step(model, inputs(), model)
    assert [phase for phase, _ in GroupedMLP_CuTeGEMMGLU.ran] == ["forward", "backward"]
    forward, backward = targets(model, "forward"), targets(model, "backward")
    assert forward.count("te_mlp_forward") == backward.count("te_mlp_backward") == 1
    assert backward.count("te_mlp_wgrad") == 2
    assert not any("grouped_swiglu" in target for target in forward + backward)
    saved = [node for node in model.graphs["forward"].graph.output_node().all_input_nodes if node.op != "placeholder"]
    shapes = {tuple(node.meta["val"].shape): node.meta["val"].dtype for node in saved}
    rows = (sum(COUNTS) + 4 * 127) // 128 * 128
    assert shapes[rows, 64] == shapes[rows, 96] == torch.uint8 and shapes[rows, 192] == torch.float32
    assert not any(len(shape) == 3 for shape in shapes)  # no weight


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = models.Joined(*SIZES, "blocks of 32")

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(self.experts, *args, use_reentrant=False)


def test_forward_runs_again_where_the_model_says_so(here: Machine) -> None:
    torch.manual_seed(0)
    model = fxshard.compile(Checkpointed(), zero=3, lowering="eager", experts=NAME)
    found = step(model, inputs(), model)
    assert [phase for phase, _ in GroupedMLP_CuTeGEMMGLU.ran] == ["forward", "forward", "backward"]
    torch.manual_seed(0)
    same = fxshard.compile(models.Joined(*SIZES, "blocks of 32"), zero=3, lowering="eager", experts=NAME)
    expected = step(same, inputs(), same)
    assert all(torch.equal(found[key if key in found else f"experts.{key}"], expected[key]) for key in expected)


def test_frozen_weights_have_no_gradients(here: Machine) -> None:
    frozen = models.Joined(*SIZES, "blocks of 32").requires_grad_(False)
    model = fxshard.compile(frozen, zero=3, lowering="eager", experts=NAME)
    args = inputs()
    model(*args).square().sum().backward()
    assert args[0].grad is not None and args[0].grad.any() and "te_mlp_wgrad" not in targets(model, "backward")


@pytest.mark.shows("G8")
@pytest.mark.parametrize("weighted_bias", [False, True])
@pytest.mark.parametrize("glu", [SWIGLU, CLAMPED_GEGLU], ids=["swiglu", "geglu"])
def test_the_operators_with_biases(here: Machine, glu: Glu, weighted_bias: bool) -> None:
    p = in_blocks(problem([128, 0, 256, 128], hidden=64, inner=96, biased=True, scale=2.0))
    with mock.patch.multiple(sys.modules[__name__], COUNTS=p.counts):
        expected = result_and_gradients(p, by_hand(p, glu, weighted_bias=weighted_bias))
    upstream = torch.randn(p.x.shape, generator=torch.Generator().manual_seed(1))
    x, gate, down, biases, weights = p.x.detach(), p.gate_up.detach(), p.down.detach(), [], p.weights
    assert p.gate_up_bias is not None and p.down_bias is not None and weights is not None
    biases = [p.gate_up_bias.detach(), p.down_bias.detach()]
    options = (*biases, weights.detach(), glu.alpha, glu.limit, glu.offset, 32, weighted_bias)
    rowwise, columnwise = (
        [part for stack in (gate, down) for part in mxfp8_quantize(stack, axis)] for axis in (ROWWISE, COLUMNWISE)
    )
    out, tokens, tokens_scales, pre, hidden, hidden_scales = te_mlp_forward(x, p.offsets, *rowwise, *options, True)
    found = te_mlp_backward(upstream, p.offsets, pre, *columnwise, *options)
    grad_x, grad_weights, of_pre, of_pre_scales, of_out, of_out_scales, gate_bias, down_bias = found
    of_gate = te_mlp_wgrad(of_pre, of_pre_scales, tokens, tokens_scales, p.offsets, torch.float32)
    of_down = te_mlp_wgrad(of_out, of_out_scales, hidden, hidden_scales, p.offsets, torch.float32)
    mine = {"output": out, "x": grad_x, "weights": grad_weights, "gate_up": of_gate, "down": of_down}
    mine |= {"gate_up_bias": gate_bias, "down_bias": down_bias}
    assert mine.keys() == expected.keys() and max(distances(mine, expected).values()) < 1e-5
    alone, *nothing = te_mlp_forward(x, p.offsets, *rowwise, *options, False)
    assert torch.equal(alone, out) and not any(each.numel() for each in nothing)
    # Weights are lent and not copied.
    for (_, places), stacks in zip(GroupedMLP_CuTeGEMMGLU.ran, (rowwise, columnwise, rowwise), strict=True):
        assert places == [matrix.data_ptr() for stack in stacks[::2] for matrix in stack]
    # What a unit gathered does not live on because of the operations, which are the same for all such experts.
    scales_bias, before = weighted_bias, fused_mlp.cache_info().currsize
    turned = replace(glu, interleave=32)
    mlp = fused_mlp(Form(4, 64, 96, 64, turned, (True, True), scales_bias, torch.float32, x.device))
    assert fused_mlp.cache_info().currsize == before == 1
    for linear in (mlp._first, mlp._second):
        assert not list(linear.parameters()) and linear.wgrad_store.context.empty()
        assert not hasattr(linear, "weight0") and not hasattr(linear, "bias0")


def test_the_operators_say_what_shapes_they_give(here: Machine) -> None:
    p = in_blocks(problem([128, 0], hidden=64, inner=64, biased=True))
    weights = [part for stack in (p.gate_up, p.down) for part in mxfp8_quantize(stack.detach(), ROWWISE)]
    assert p.gate_up_bias is not None and p.down_bias is not None and p.weights is not None
    biases = p.gate_up_bias.detach(), p.down_bias.detach()
    options = (*weights, *biases, p.weights.detach(), 1.0, float("inf"), 0.0, 32, True)
    rules = ("test_faketensor",)
    x = p.x.detach()
    for trains in (False, True):
        torch.library.opcheck(te_mlp_forward, (x, p.offsets, *options, trains), test_utils=rules)
    kept = te_mlp_forward(x, p.offsets, *options, True)
    columnwise = [part for stack in (p.gate_up, p.down) for part in mxfp8_quantize(stack.detach(), COLUMNWISE)]
    torch.library.opcheck(te_mlp_backward, (x, p.offsets, kept[3], *columnwise, *options[4:]), test_utils=rules)
    torch.library.opcheck(te_mlp_wgrad, (*kept[1:3], *kept[4:6], p.offsets, torch.float32), test_utils=rules)


def test_another_version_that_keeps_other_tensors_is_an_error(here: Machine) -> None:
    saves = OperationContext.save_for_backward
    here.patch.setattr(OperationContext, "save_for_backward", lambda self, *tensors: saves(self, *tensors, None))
    model = fxshard.compile(models.Joined(*SIZES, "blocks of 32"), lowering="eager", experts=NAME)
    with pytest.raises(fxshard.ConfigError, match=r"Engine 2.20.2 is not the one .*: it saves 20 tensors for backward"):
        step(model, inputs(), model)


# -- weights that rest quantized, and ranks ----------------------------------------------------------------------------


@pytest.mark.shows("G10")
def test_weights_that_were_gathered_quantized_are_not_quantized_again(here: Machine) -> None:
    torch.manual_seed(0)
    plain, args = models.Joined(*SIZES, "blocks of 32"), inputs()
    model = fxshard.compile(copy.deepcopy(plain), lowering="eager", experts=NAME, precision=fxshard.MXFP8())
    found = step(model, args, model)
    # It computes in bf16, where blocks may have other scales.
    p = Problem(args[0], COUNTS, plain.gate_up, plain.down, args[2])
    narrow = replace(p, **{name: as_bf16(value) for name, value in p.tensors().items()})
    out = by_hand(narrow)
    out.square().sum().backward()
    expected = {name: value.grad for name, value in narrow.tensors().items()} | {"output": out.detach()}
    away = distances(found, expected)
    assert max(away.values()) < 2e-2, away
    assert "mxfp8_quantize" not in targets(model, "forward", "backward")
    (_, forward), (_, backward) = GroupedMLP_CuTeGEMMGLU.ran
    assert len({*forward, *backward}) == len(forward) + len(backward) == 16  # rowwise and columnwise copies


def test_float8_is_another_format(here: Machine) -> None:
    precision = fxshard.Float8(experts=("*",))
    model = fxshard.compile(models.Joined(*SIZES, "blocks of 32"), lowering="eager", experts=NAME, precision=precision)
    with pytest.raises(fxshard.ConfigError, match=r"multiplies in MXFP8, and fxshard.Float8 chooses 'gate_up'"):
        step(model, inputs(), model)


class Lm(nn.Module):
    """Its embedding is larger than a layer: weight gradients of the first layer may run behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(1024, 64)
        self.layers = nn.ModuleList(models.Joined(4, 64, 64, "blocks of 32") for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.emb(tokens)
        rows = torch.ones_like(h[:, 0])
        ends = torch.arange(1, 5, device=h.device, dtype=torch.int32) * (h.shape[0] // 4)
        for layer in self.layers:
            h = h + layer(h, ends, rows)
        return h.square().mean()


@dataclass
class Trained:
    loss: float
    gradients: dict[str, Tensor]
    behind: list[bool]
    """For each weight gradient, whether it is computed after the embedding's."""


def trained(defer: bool) -> Trained:
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        patch.setitem(choose._REFUSALS, NAME, lambda case: None)
        for each in (by_te.engine, choose.implementation, fused_mlp):
            each.cache_clear()
        machine.import_engine()
        torch.manual_seed(0)
        debug = fxshard.Debug(defer_wgrad=defer)
        model = fxshard.compile(Lm(), lowering="eager", experts=NAME, precision=fxshard.MXFP8(), debug=debug)
        loss = model(torch.arange(64))
        loss.backward()
        model.schedule.verify()
        names = targets(model, "backward")
        embedding = next(i for i, name in enumerate(names) if "embedding_dense_backward" in name)
        behind = [i > embedding for i, name in enumerate(names) if name == "te_mlp_wgrad"]
        found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        for each in (by_te.engine, choose.implementation, fused_mlp):
            each.cache_clear()
        return Trained(loss.item(), found, behind)


def both() -> tuple[Trained, Trained]:
    return trained(True), trained(False)


@pytest.mark.thorough
@pytest.mark.shows("G9", "G10")
def test_weight_gradients_are_deferred_on_ranks(ranks: Pool) -> None:
    for mine, theirs in ranks(2, both):
        assert mine.behind == [False, False, True, True] and theirs.behind == [False] * 4
        assert mine.loss == theirs.loss
        assert all(torch.equal(mine.gradients[name], theirs.gradients[name]) for name in theirs.gradients)
        assert all(gradient.any() for gradient in mine.gradients.values())
