"""On a GPU: every implementation computes what experts one by one do; the host waits for Transformer Engine alone.

What runs Transformer Engine's fused grouped MLP (``te-mxfp8``) is skipped where the compute capability is not 10.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import fxshard
from fxshard.bench.expert_costs import IMPLEMENTATIONS, Grid, measure_costs
from fxshard.kernels import costs
from fxshard.kernels.case import Case
from fxshard.kernels.choose import choose, refusal
from fxshard.kernels.costs import COMPILER
from fxshard.kernels.glu import CLAMPED_GEGLU, SWIGLU, Glu, interleave_glu
from tests.fused import models
from tests.fused.reference import (
    Problem,
    distances,
    expert_by_expert,
    fused,
    problem,
    result_and_gradients,
)
from tests.gpu.waiting import no_waiting

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
HIDDEN, INNER = 576, 704  # no multiples of a tile
COUNTS = [130, 0, 1, 300, 64, 17]


def available(name: str, **case: object) -> None:
    reason = refusal(name, Case(torch.device("cuda"), BF16, HIDDEN, INNER, **case))  # type: ignore[arg-type]
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


def make(counts: list[int] = COUNTS, **options: object) -> Problem:
    return problem(counts, hidden=HIDDEN, inner=INNER, dtype=BF16, device="cuda", **options)  # type: ignore[arg-type]


def exact(p: Problem, glu: Glu = SWIGLU) -> dict[str, torch.Tensor]:
    wide = replace(p, **{name: value.detach().double().requires_grad_() for name, value in p.tensors().items()})
    return result_and_gradients(wide, expert_by_expert(wide, glu))


def sharded_from_plain(**options: Any) -> tuple[dict[str, float], fxshard.ShardedModule]:
    """How far results and gradients of a sharded model are from those of the plain one; and the sharded one."""
    torch.manual_seed(0)
    plain = models.Joined(6, HIDDEN, INNER, "blocks of 32").to("cuda", BF16)
    p = make()
    model = fxshard.compile(copy.deepcopy(plain), zero=3, **options)
    found = []
    for each in (plain, model):
        p.x.grad = p.weights.grad = None  # type: ignore[union-attr]
        out = each(p.x, p.offsets, p.weights)
        out.square().mean().backward()
        grads = {key: parameter.grad for key, parameter in each.named_parameters()}
        found.append({"y": out.detach(), "x": p.x.grad, "weights": p.weights.grad, **grads})  # type: ignore[union-attr]
    return distances(found[1], found[0]), model


def check(p: Problem, mine: dict[str, torch.Tensor], glu: Glu = SWIGLU) -> None:
    found = distances(mine, exact(p, glu))
    # Where rounding carries a pre-activation over the limit, all of its derivative comes or goes.
    assert max(found.values()) < (2.5e-2 if glu.limit != math.inf else 1.5e-2), found


@pytest.mark.shows("G3", "G4", "G8")
@pytest.mark.parametrize("name", ["torch", "triton", "te"])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("glu", [SWIGLU, CLAMPED_GEGLU], ids=["swiglu", "geglu"])
def test_equals_experts_one_by_one(name: str, separate: bool, weighted: bool, glu: Glu) -> None:
    available(name)
    p = make(weighted=weighted, scale=3.0)
    check(p, result_and_gradients(p, fused(p, glu, separate=separate, implementation=name)), glu)


@pytest.mark.shows("G3")
@pytest.mark.parametrize("name", ["torch", "triton", "te"])
def test_all_tokens_on_one_expert(name: str) -> None:
    available(name)
    p = make([0, 0, 513, 0])
    check(p, result_and_gradients(p, fused(p, implementation=name)))


@pytest.mark.parametrize("name", ["torch", "triton", "te"])
def test_many_tokens_per_expert(name: str) -> None:
    available(name)
    p = make([2100, 0, 1500])
    check(p, result_and_gradients(p, fused(p, implementation=name)))


@pytest.mark.parametrize("name", ["torch", "triton", "te"])
def test_weights_that_lie_the_other_way(name: str) -> None:
    available(name)
    p = make()
    for value in (p.gate_up, p.down):  # the same values and shapes, columns first in memory
        value.data = value.data.mT.contiguous().mT
    check(p, result_and_gradients(p, fused(p, implementation=name)))


@pytest.mark.shows("G5", "G6")
@pytest.mark.parametrize("name", ["torch", "te"])
@pytest.mark.parametrize("size", [0, 1, 32])
def test_biases_and_interleaving(name: str, size: int) -> None:
    available(name, biased=True, glu=Glu(interleave=size))
    p = make(biased=True)
    turned = p
    if size:
        turned = replace(
            p,
            gate_up=interleave_glu(p.gate_up.detach(), size, 1).requires_grad_(),
            gate_up_bias=interleave_glu(p.gate_up_bias.detach(), size).requires_grad_(),  # type: ignore[union-attr]
        )
    glu = replace(CLAMPED_GEGLU, interleave=size)
    mine = result_and_gradients(turned, fused(turned, glu, implementation=name))
    theirs = exact(p, CLAMPED_GEGLU)
    for key in ("gate_up", "gate_up_bias") if size else ():
        theirs[key] = interleave_glu(theirs[key], size, 1)
    found = distances(mine, theirs)
    assert max(found.values()) < 1.5e-2, found


@pytest.mark.shows("G8")
@pytest.mark.parametrize("name", ["torch", "triton", "te"])
def test_weights_are_not_copied(name: str) -> None:
    available(name)
    assert_copies_no_weights(name)


def assert_copies_no_weights(name: str) -> None:
    p = make([8] * len(COUNTS))
    weights = 2 * (p.gate_up.numel() + p.down.numel())
    fused(p, implementation=name)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fused(p, implementation=name)
    assert torch.cuda.max_memory_allocated() - before < weights / 4


class FixedOffsets(Problem):
    """Offsets that are on the device already."""

    ends: torch.Tensor

    @property
    def offsets(self) -> torch.Tensor:
        return self.ends


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_step_synchronises_nowhere(name: str) -> None:
    available(name)
    p = make()
    upstream = torch.randn_like(p.x)
    fixed = FixedOffsets(**{field: getattr(p, field) for field in p.__dataclass_fields__})
    fixed.ends = p.offsets
    fused(fixed, implementation=name).backward(upstream)
    with no_waiting():
        fused(fixed, implementation=name).backward(upstream)


@pytest.mark.shows("G1", "G7")
@pytest.mark.parametrize("name", ["auto", "torch", "triton", "te"])
def test_a_sharded_model_runs_it(name: str) -> None:
    if name != "auto":
        available(name)
    torch.manual_seed(0)
    plain = models.WeightedAfter(6, HIDDEN, INNER).to("cuda", BF16)
    p = make()
    args = (p.x, p.offsets, p.weights)
    model = fxshard.compile(copy.deepcopy(plain), zero=3, experts=name)
    reference, mine = plain(*args), model(*args)
    reference.square().mean().backward()
    mine.square().mean().backward()
    grads = {key: parameter.grad for key, parameter in model.named_parameters()}
    theirs = {key: parameter.grad for key, parameter in plain.named_parameters()}
    assert max(distances({"y": mine, **grads}, {"y": reference, **theirs}).values()) < 2e-2
    (found,) = fxshard.explain(plain, args, experts=name).fused
    case = Case(torch.device("cuda"), BF16, HIDDEN, INNER, experts=6)
    assert found.implementation == (choose("auto", case).name if name == "auto" else name)


# -- Transformer Engine's fused grouped MLP ----------------------------------------------------------------------------

BLOCKS = Glu(interleave=32)


@pytest.mark.shows("G7")
def test_te_mxfp8_names_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    available("te")
    variable, case = "NVTE_CUTEDSL_FUSED_GROUPED_MLP", Case(torch.device("cuda"), BF16, HIDDEN, INNER, glu=BLOCKS)
    monkeypatch.delenv(variable, raising=False)
    assert f"{variable} is not set" in str(refusal("te-mxfp8", case))
    monkeypatch.setenv(variable, "1")
    major, minor = torch.cuda.get_device_capability()
    if major == 10:
        return  # what is still lacking here is the reason why the next test is skipped, if it is
    assert str(refusal("te-mxfp8", case)).endswith(f"needs compute capability 10, this is {major}.{minor}")
    with pytest.raises(fxshard.ConfigError, match=r'experts="te-mxfp8" cannot run these experts: .* capability 10'):
        choose("te-mxfp8", case)


def test_costs_are_measured() -> None:
    """Of all that runs here, and of the compiler for a dense MLP; the choice follows."""
    grid = Grid(("4x1024x512",), ("1x1024x1024",), (1024, 2048), (1024,))
    table, _ = measure_costs(grid, IMPLEMENTATIONS, "cuda", rounds=2, repeat=2)
    case = Case(torch.device("cuda"), BF16, 1024, 512, experts=4)
    running = {name for name in IMPLEMENTATIONS if refusal(name, case) is None}
    first, second, dense = table.measurements
    assert set(first.step_ms) == set(second.step_ms) == running
    assert set(dense.step_ms) == {COMPILER} | (running & {"triton"})
    nearest = table.nearest(case, dense=False)
    assert nearest is not None and nearest.tokens == (1024, 2048)
    with mock.patch.dict(costs._ADDED, {table.device: table}):
        choice = choose("auto", case)
    assert choice.name == next(iter(nearest.rates)) and choice.why.startswith(
        f"measured on {table.device} for 4 × 1024"
    )


@pytest.mark.parametrize("precision", [None, fxshard.MXFP8()], ids=["bf16", "gathered quantized"])
def test_te_mxfp8_in_a_sharded_model_where_it_can_run(precision: fxshard.MXFP8 | None) -> None:
    """The fused kernel, phase by phase. MXFP8 must be near, and must not be bf16."""
    available("te-mxfp8", glu=BLOCKS)
    away, model = sharded_from_plain(experts="te-mxfp8", precision=precision)
    assert "te_mlp_wgrad" in str(model.graphs["backward"].graph)
    assert max(away.values()) < 0.15 and min(away.values()) >= 5e-3, away
