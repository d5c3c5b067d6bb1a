"""Experts are found in the forms people write, and compute the same when they are one operator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxshard
from fxshard.kernels.report import ExpertsReport
from fxshard.passes.context import PassContext
from fxshard.passes.options import Options
from fxshard.passes.pipeline import before_autograd
from fxshard.schedule.events import Phase
from tests.fused import models

EXPERTS, DIM, INNER, TOKENS = 4, 16, 32, 20
OFFSETS = torch.tensor([5, 5, 12, 20], dtype=torch.int32)
IDS = torch.tensor([0] * 5 + [2] * 7 + [3] * 8)
SIZES = (EXPERTS, DIM, INNER)

FORMS: dict[str, tuple[Any, torch.Tensor, str]] = {
    "gate and up separate": (lambda: models.Titan(*SIZES), OFFSETS, "gate and up separate"),
    "not transposed": (lambda: models.Titan(*SIZES, transposed=False), OFFSETS, "gate and up separate"),
    "weight before": (lambda: models.WeightedBefore(*SIZES), OFFSETS, "before the second product"),
    "weight after": (lambda: models.WeightedAfter(*SIZES), OFFSETS, "after the second product"),
    "joined": (lambda: models.Joined(*SIZES), OFFSETS, "gate and up joined"),
    "joined, split": (lambda: models.Joined(*SIZES, "split"), OFFSETS, "gate and up joined"),
    "joined, slices": (lambda: models.Joined(*SIZES, "slices"), OFFSETS, "gate and up joined"),
    "alternating columns": (lambda: models.Joined(*SIZES, "alternating"), OFFSETS, "interleave 1,"),
    "joined, pairs": (lambda: models.Joined(*SIZES, "pairs of halves"), OFFSETS, "gate and up joined, routing"),
    "alternating pairs": (lambda: models.Joined(*SIZES, "pairs of columns"), OFFSETS, "interleave 1,"),
    "alternating blocks": (lambda: models.Joined(*SIZES, "blocks of 32"), OFFSETS, "interleave 32"),
    "clamped, biased": (lambda: models.Clamped(*SIZES), IDS, "clamped quick-GeGLU (alpha 1.702, limit 7, offset 1)"),
    "checkpointed": (lambda: models.Checkpointed(*SIZES), OFFSETS, "gate and up separate"),
    "a loop over modules": (lambda: models.Loop(*SIZES), OFFSETS, "4 experts, SwiGLU, gate and up separate"),
}


def inputs(offsets: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, DIM, generator=generator).to(dtype).requires_grad_()
    return x, offsets, torch.rand(TOKENS, generator=generator).to(dtype).requires_grad_()


def run(model: Any, args: tuple[torch.Tensor, ...], params: nn.Module) -> dict[str, torch.Tensor]:
    for leaf in (*args, *params.parameters()):
        leaf.grad = None
    out = model(*args)
    out.square().sum().backward()
    leaves = {"x": args[0], "weights": args[2], **dict(params.named_parameters())}
    return {"output": out.detach(), **{name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


def rewritten(model: nn.Module, experts: str = "auto") -> tuple[Callable[..., Tensor], ExpertsReport, list[str]]:
    """The model as the passes before autograd leave it, run node by node; the report and the calls come with that."""
    context = PassContext((), Options(experts=experts), Phase.FORWARD)
    calls: list[str] = []

    def backend(module: fx.GraphModule, _: object) -> Callable[..., Any]:
        module = before_autograd(module, context)
        graphs = [found.graph for found in module.modules() if isinstance(found, fx.GraphModule)]
        calls.extend(str(node.target) for graph in graphs for node in graph.nodes)
        return module.forward

    return torch.compile(model, backend=backend, fullgraph=True), context.experts, calls


def check_fused(calls: list[str], number: int = 1) -> None:
    """So many operators, and no other grouped product."""
    assert not any("grouped_mm" in target or "grouped_product" in target for target in calls)
    assert sum(target.startswith("fxshard.grouped_swiglu.") for target in calls) == number


def check_same(mine: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert mine.keys() == reference.keys()
    for name, theirs in reference.items():
        assert (mine[name] - theirs).norm() < tolerance * theirs.norm(), name


@pytest.mark.shows("G1", "G3", "G4", "G5")
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_found_and_computes_the_same(form: str) -> None:
    make, offsets, described = FORMS[form]
    model, args = make(), inputs(offsets)
    reference = run(model, args, model)
    fused, report, calls = rewritten(model)
    check_same(run(fused, args, model), reference)
    check_fused(calls)
    (found,) = report.fused
    assert described in found.form and found.implementation == "torch"


@pytest.mark.shows("G1", "G3")
@pytest.mark.parametrize("make", [models.Titan, models.TorchPrivate], ids=["F.grouped_mm", "torch._grouped_mm"])
def test_torchs_grouped_products(make: Any) -> None:
    """In bf16, which is all that torch can trace them for."""
    model, args = make(*SIZES).bfloat16(), inputs(OFFSETS, torch.bfloat16)
    reference = run(model, args, model)
    fused, _, calls = rewritten(model)
    check_same(run(fused, args, model), reference, tolerance=2e-2)
    check_fused(calls)


def test_a_loop_over_no_tokens() -> None:
    class Unbound(models.Loop):
        def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
            return torch.stack([expert(part) for expert, part in zip(self.experts, x.unbind(0), strict=True)])

    model, (_, offsets, weights) = Unbound(*SIZES), inputs(OFFSETS)
    fused, report, _ = rewritten(model)
    assert fused(torch.empty(EXPERTS, 0, DIM), offsets, weights).shape == (EXPERTS, 0, DIM)
    assert report.fused


def test_a_model_that_is_not_sharded_is_fused_too() -> None:
    model = models.WeightedAfter(*SIZES)
    args = inputs(OFFSETS)
    reference = run(model, args, model)
    check_same(run(torch.compile(model, backend="fxshard", fullgraph=True), args, model), reference)  # by Inductor


def test_off_leaves_the_model_as_written() -> None:
    model = models.Titan(*SIZES)
    fused, report, calls = rewritten(model, experts="off")
    fused(*inputs(OFFSETS))
    assert calls and not any("grouped_swiglu" in target for target in calls) and not report.fused


@pytest.mark.shows("G7")
def test_a_forced_implementation_that_cannot_run_says_why() -> None:
    model, args = models.Titan(*SIZES), inputs(OFFSETS)
    said = 'experts="{}" cannot run these experts: .*CUDA.*experts="auto"'
    with pytest.raises(fxshard.ConfigError, match=said.format("triton")):
        fxshard.compile(copy.deepcopy(model), lowering="eager", experts="triton")(*args)
    with pytest.raises(fxshard.ConfigError, match=said.format("te")):
        fxshard.explain(model, args, experts="te")
    with pytest.raises(fxshard.ConfigError, match="expected one of 'auto', 'torch'"):
        fxshard.compile(model, experts="fast")


def test_a_plan_does_not_need_the_machine_it_is_for() -> None:
    schedule = fxshard.plan(models.Titan(*SIZES), inputs(OFFSETS), world_size=8, experts="triton")
    assert schedule.events
