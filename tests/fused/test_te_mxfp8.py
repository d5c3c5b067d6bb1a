"""Transformer Engine's fused grouped MLP: its gates are named, it is used as it is meant to be, and never unfused.

On a stand-in (``te_stand_in``): what can be shown without the device. The operations themselves run in
``tests/gpu/test_fused_cuda.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fxshard
from fxshard.kernels import by_te, choose
from fxshard.kernels.by_te_mxfp8 import FusedGroupedMlp, _stack
from fxshard.kernels.case import Case
from fxshard.kernels.glu import CLAMPED_GEGLU, SWIGLU, Glu
from fxshard.kernels.op import grouped_swiglu_gradients
from fxshard.kernels.te_gates import ALLOWS
from tests.fused import models
from tests.fused.reference import (
    distances,
    expert_by_expert,
    fused,
    in_blocks,
    in_halves,
    problem,
    result_and_gradients,
)
from tests.fused.te_fused_stand_in import VARIABLE, GroupedMLP_CuTeGEMMGLU
from tests.fused.te_stand_in import Machine, Sequential

NAME = "te-mxfp8"
BLOCKS = Glu(interleave=32)
CASE = Case(torch.device("cuda"), torch.bfloat16, 128, 64, glu=BLOCKS)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    by_te.engine.cache_clear()
    choose.implementation.cache_clear()
    yield Machine(monkeypatch)
    by_te.engine.cache_clear()
    choose.implementation.cache_clear()


@pytest.fixture
def here(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The same, and experts on a CPU pass for experts on that machine."""
    monkeypatch.setitem(choose._REFUSALS, NAME, lambda case: None)
    machine.import_engine()
    return machine


# -- gates -------------------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[Machine], None]:
    return lambda machine: machine.patch.delattr(machine.cudnn, name)


def frontend(version: str | None) -> Callable[[Machine], None]:
    return lambda machine: setattr(machine, "frontend", version)


GATES: dict[str, tuple[dict[str, Any], Callable[[Machine], object], str]] = {
    "device": ({"device": torch.device("cpu")}, lambda m: None, "they are on cpu, .* needs a CUDA device"),
    "dtype": ({"dtype": torch.float16}, lambda m: None, "quantizes bfloat16, they are torch.float16"),
    "two weights": ({"joined": False}, lambda m: None, "takes gate and up as one weight, they are two"),
    "halves": ({"glu": SWIGLU}, lambda m: None, r"alternating every 32 columns, they are halves \(.*interleave_glu"),
    "columns": ({"glu": Glu(interleave=1)}, lambda m: None, "every 32 columns, they alternate every 1 "),
    "layout": ({"out_by_in": False}, lambda m: None, r"reads .* as \[out, in\], they lie \[in, out\]"),
    "hidden": ({"hidden": 96}, lambda m: None, "hidden size 96 and inner size 64 must be multiples of 64"),
    "inner": ({"inner": 32}, lambda m: None, "inner size 32 must be multiples of 64"),
    "no variable": ({}, lambda m: m.patch.delenv(VARIABLE), f"{VARIABLE} is not set: set it to 1 before .* imported"),
    "variable": ({}, lambda m: m.patch.setenv(VARIABLE, "no"), f"{VARIABLE} is 'no': set it to 1"),
    "version": ({}, lambda m: setattr(m.engine, "__version__", "2.16.1"), "Engine 2.16.1 is older than 2.17"),
    "version of the operation": (
        {},
        lambda m: setattr(m.engine, "__version__", "2.19.1"),
        "Engine 2.19.1 is older than 2.20, whose fused",
    ),
    "capability": ({}, lambda m: setattr(m, "capability", (9, 0)), "needs compute capability 10, this is 9.0"),
    "determinism": ({}, lambda m: m.patch.setenv(ALLOWS, "0"), "in no fixed order, and that is ruled out"),
    "no frontend": ({}, frontend(None), "nvidia-cudnn-frontend is not installed: install 1.23 or later"),
    "frontend": ({}, frontend("1.22.1"), "nvidia-cudnn-frontend 1.22.1 is older than 1.23"),
    "constants": ({"glu": Glu(1.5, 7.0, 1.0, 32)}, frontend("1.23.0"), r"1.23.0 has no .*alpha 1.5.*: 1.24 or later"),
    "kernels": ({}, without("grouped_gemm_dglu_wrapper_sm100"), r"1.24.1 does not give .* \(AttributeError: .*dglu"),
    "no operation": (
        {},
        lambda m: m.patch.delattr(m.fused, GroupedMLP_CuTeGEMMGLU.__name__),
        "2.20.2 has no GroupedMLP",
    ),
}


@pytest.mark.shows("G7")
@pytest.mark.parametrize("gate", GATES)
def test_each_gate_is_named(gate: str, machine: Machine) -> None:
    change, spoil, said = GATES[gate]
    assert machine.refusal(CASE) is None and machine.refusal(replace(CASE, glu=Glu(1.702, 7.0, 1.0, 32))) is None
    by_te.engine.cache_clear()
    spoil(machine)
    reason = machine.refusal(replace(CASE, **change))
    assert reason is not None
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(reason)


@pytest.mark.shows("G7")
def test_a_variable_that_is_set_too_late(machine: Machine) -> None:
    """Nothing of fxshard imports Transformer Engine before it is set; who did so before is told."""
    machine.patch.delenv(VARIABLE)
    assert "is not set" in str(machine.refusal(CASE)) and by_te.engine.cache_info().currsize == 0
    machine.import_engine()
    machine.patch.setenv(VARIABLE, "1")
    assert machine.refusal(CASE) == f"{VARIABLE} was set after Transformer Engine had been imported: set it before"
    machine.patch.setattr(GroupedMLP_CuTeGEMMGLU, "is_supported", lambda: False)
    assert "says that GroupedMLP_CuTeGEMMGLU is not supported here" in str(machine.refusal(CASE))


@pytest.mark.shows("G7")
def test_it_is_never_chosen_and_says_why_it_cannot_be(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose.choose("auto", replace(CASE, device=torch.device("cpu"))).name == "torch"
    assert NAME not in choose._FASTEST_FIRST and NAME in choose.choices()
    args = inputs()
    with pytest.raises(
        fxshard.ConfigError, match=r'experts="te-mxfp8" cannot run these experts: they are on cpu.*auto'
    ):
        fxshard.explain(models.Joined(*SIZES, "blocks of 32"), args, experts=NAME)
    cases: list[Case] = []
    monkeypatch.setitem(choose._REFUSALS, NAME, lambda case: cases.append(case) or "seen")  # type: ignore[func-returns-value]
    for model in (models.Joined(*SIZES), models.Titan(*SIZES), models.Titan(*SIZES, transposed=False)):
        with pytest.raises(fxshard.ConfigError, match="seen"):
            fxshard.explain(model, args, experts=NAME)
    assert [(case.joined, case.out_by_in) for case in cases] == [(True, True), (False, True), (False, False)]


# -- the step ----------------------------------------------------------------------------------------------------------

COUNTS = [5, 0, 130, 3]
SIZES = (4, 64, 64)


def inputs() -> tuple[torch.Tensor, ...]:
    p = problem(COUNTS, hidden=64, inner=64)
    assert p.weights is not None
    return p.x, p.offsets, p.weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_step_is_the_definition(here: Machine, weighted: bool, biased: bool) -> None:
    p = problem(COUNTS, hidden=64, inner=64, weighted=weighted, biased=biased, scale=4.0)
    turned = in_blocks(p)
    for glu, weighted_bias in ((SWIGLU, True), (CLAMPED_GEGLU, False)):
        reference = result_and_gradients(p, expert_by_expert(p, glu, weighted_bias=weighted_bias))
        out = fused(turned, replace(glu, interleave=32), weighted_bias=weighted_bias, implementation=NAME)
        assert max(distances(in_halves(result_and_gradients(turned, out)), reference).values()) < 2e-6
    assert turned.gate_up.grad is not None and turned.gate_up.grad.is_contiguous()


@pytest.mark.shows("G8")
def test_weights_are_lent_and_not_copied(here: Machine) -> None:
    p = in_blocks(problem(COUNTS, hidden=64, inner=64))
    other = in_blocks(problem(COUNTS, hidden=64, inner=64))
    for each in (p, other):
        result_and_gradients(each, fused(each, BLOCKS, implementation=NAME))
    wanted = [[row.data_ptr() for stack in (each.gate_up, each.down) for row in stack] for each in (p, other)]
    assert Sequential.addresses == [wanted[0], wanted[0], wanted[1], wanted[1]]  # forward, and again in backward
    (mlp,) = choose.implementation(NAME)._built.values()  # type: ignore[attr-defined]
    assert not any(parameter.numel() for stack in mlp._parameters for parameter in stack)
    p.gate_up.data = p.gate_up.data.mT.contiguous().mT
    with pytest.raises(
        fxshard.ConfigError, match=r"reads weights that lie \[experts, out, in\], and this one of shape"
    ):
        fused(p, BLOCKS, implementation=NAME)


@pytest.mark.shows("G7")
@pytest.mark.parametrize("inference", [False, True])
def test_what_is_not_fused_is_an_error(here: Machine, inference: bool) -> None:
    here.patch.setattr(Sequential, "fuses", False)
    p = in_blocks(problem(COUNTS, hidden=64, inner=64))
    said = "2.20.2 did not fuse 4 experts, hidden size 64, inner size 64, SwiGLU: it ran GroupedLinear, ScaledSwiGLU, "
    with torch.inference_mode(inference), pytest.raises(fxshard.ConfigError, match=said):
        fused(p, BLOCKS, implementation=NAME)


def test_other_recipes_get_no_rows_of_no_expert(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations one by one split their input by the counts. Unfused is what they are meant to be."""
    here.patch.setattr(Sequential, "fuses", False)
    monkeypatch.setitem(choose._MAKE, "te-bf16", FusedGroupedMlp)
    p = problem(COUNTS, hidden=64, inner=64)
    longer = replace(p, x=torch.cat((p.x, p.x[:7])).detach().requires_grad_())
    longer.weights = torch.cat((p.weights, p.weights[:7])).detach().requires_grad_()  # type: ignore[arg-type]
    reference = result_and_gradients(p, fused(p))
    mine = result_and_gradients(longer, fused(longer, implementation="te-bf16"))
    assert not mine["output"][138:].any() and not mine["x"][138:].any()
    cut = {key: value[:138] if key in ("output", "x", "weights") else value for key, value in mine.items()}
    assert max(distances(cut, reference).values()) < 2e-6


def test_the_operator_keeps_torchs_rules_and_is_counted(here: Machine) -> None:
    p = in_blocks(problem([3, 0], hidden=64, inner=64, biased=True))
    tensors = (p.x, p.offsets, p.gate_up.mT, None, p.down.mT, p.gate_up_bias, None, p.down_bias, p.weights)
    flat = [each.detach() if each is not None else None for each in tensors]
    rules = ("test_schema", "test_faketensor", "test_autograd_registration")
    options = (1.0, float("inf"), 0.0, 32, True, NAME)
    torch.library.opcheck(grouped_swiglu_gradients, (torch.ones_like(p.x), *flat, *options), test_utils=rules)
    with FlopCounterMode(display=False) as counter:
        fused(p, BLOCKS, implementation=NAME).sum().backward()
    assert counter.get_total_flops() == (1 + 3) * 3 * 2 * 3 * 64 * 64


def test_gradients_that_lie_together_are_not_copied() -> None:
    packed = torch.arange(24.0).view(4, 2, 3)
    together, apart = _stack(list(packed[1:].unbind(0))), _stack([each.clone() for each in packed[1:]])
    assert together.data_ptr() == packed[1].data_ptr()
    assert torch.equal(together, packed[1:]) and torch.equal(apart, packed[1:])
    assert torch.equal(_stack([packed[2], packed[1]]), torch.stack((packed[2], packed[1])))
