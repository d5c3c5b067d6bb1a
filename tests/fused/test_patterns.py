"""Experts are found in the forms people write, and compute the same when they are one operator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
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
    "alternating blocks": (lambda: models.Joined(*SIZES, "blocks of 32"), OFFSETS, "interleave 32"),
    "clamped, biased": (lambda: models.Clamped(*SIZES), IDS, "clamped quick-GeGLU (alpha 1.702, limit 7, offset 1)"),
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


def fused_nodes(model: fxshard.ShardedModule) -> int:
    """How many experts of the captured forward are the operator, after checking that no other product is left."""
    targets = [str(node.target) for node in model.graphs["forward"].graph.nodes]
    assert not any("grouped_mm" in target or "grouped_product" in target for target in targets)
    return sum(target.startswith("fxshard.grouped_swiglu.") for target in targets)


@pytest.mark.shows("G1", "G3", "G4", "G5")
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_found_and_computes_the_same(form: str) -> None:
    make, offsets, described = FORMS[form]
    model = make()
    args = inputs(offsets)
    reference = run(model, args, model)
    compiled = fxshard.compile(copy.deepcopy(model), lowering="eager")
    mine = run(compiled, args, compiled)
    assert fused_nodes(compiled) == 1
    assert mine.keys() == reference.keys()
    for name, theirs in reference.items():
        assert (mine[name] - theirs).norm() < 1e-5 * theirs.norm(), name
    (found,) = fxshard.explain(model, args).fused
    assert described in found.form and found.implementation == "torch"


@pytest.mark.shows("G1", "G3")
@pytest.mark.parametrize("make", [models.Titan, models.TorchPrivate], ids=["F.grouped_mm", "torch._grouped_mm"])
def test_torchs_grouped_products(make: Any) -> None:
    """In bf16, which is all that torch can trace them for."""
    model = make(*SIZES).bfloat16()
    args = inputs(OFFSETS, torch.bfloat16)
    reference = run(model, args, model)
    compiled = fxshard.compile(copy.deepcopy(model), lowering="eager")
    mine = run(compiled, args, compiled)
    assert fused_nodes(compiled) == 1
    for name, theirs in reference.items():
        assert (mine[name] - theirs).norm() < 2e-2 * theirs.norm(), name


def test_a_model_that_is_not_sharded_is_fused_too() -> None:
    model = models.WeightedAfter(*SIZES)
    args = inputs(OFFSETS)
    reference = run(model, args, model)
    mine = run(torch.compile(model, backend="fxshard", fullgraph=True), args, model)  # through Inductor
    for name, theirs in reference.items():
        assert (mine[name] - theirs).norm() < 1e-5 * theirs.norm(), name


def test_off_leaves_the_model_as_written() -> None:
    model = fxshard.compile(models.Titan(*SIZES), lowering="eager", experts="off")
    model(*inputs(OFFSETS)).sum().backward()
    assert "grouped_swiglu" not in str(model.graphs["forward"].graph)


@pytest.mark.shows("G7")
@pytest.mark.parametrize("name", ["triton", "te"])
def test_a_forced_implementation_that_cannot_run_says_why(name: str) -> None:
    model = fxshard.compile(models.Titan(*SIZES), lowering="eager", experts=name)
    with pytest.raises(fxshard.ConfigError, match=f'experts="{name}" cannot run these experts: .*CUDA.*experts="auto"'):
        model(*inputs(OFFSETS))
    with pytest.raises(fxshard.ConfigError, match="expected one of 'auto', 'torch'"):
        fxshard.compile(models.Titan(*SIZES), experts="fast")


def test_a_plan_does_not_need_the_machine_it_is_for() -> None:
    schedule = fxshard.plan(models.Titan(*SIZES), inputs(OFFSETS), world_size=8, experts="triton")
    assert schedule.events
