"""On a GPU: every implementation computes what experts one by one do; the host waits for Transformer Engine alone."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

import fxshard
from fxshard.fused.choose import Case, choose, refusal
from fxshard.fused.glu import CLAMPED_GEGLU, SWIGLU, Glu, interleave_glu
from tests.fused import models
from tests.fused.reference import Problem, distances, expert_by_expert, fused, problem, result_and_gradients
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
    case = Case(torch.device("cuda"), BF16, HIDDEN, INNER)
    assert found.implementation == (choose("auto", case) if name == "auto" else name)
