"""Transformer Engine's fused grouped MLP: its gates are named, and outside of graphs it says where it runs.

On a stand-in (``te_stand_in``): what can be shown without the device. How graphs use it is in ``test_te_graph``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import fxshard
from fxshard.kernels import by_te, choose
from fxshard.kernels.case import Case
from fxshard.kernels.glu import SWIGLU, Glu
from fxshard.kernels.te_gates import ALLOWS
from tests.fused import models
from tests.fused.reference import fused, in_blocks, problem
from tests.fused.te_fused_stand_in import VARIABLE, GroupedMLP_CuTeGEMMGLU
from tests.fused.te_stand_in import Machine

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
    p = problem([5, 0, 130, 3], hidden=64, inner=64)
    args = (p.x, p.offsets, p.weights)
    with pytest.raises(
        fxshard.ConfigError, match=r'experts="te-mxfp8" cannot run these experts: they are on cpu.*auto'
    ):
        fxshard.explain(models.Joined(4, 64, 64, "blocks of 32"), args, experts=NAME)
    cases: list[Case] = []
    monkeypatch.setitem(choose._REFUSALS, NAME, lambda case: cases.append(case) or "seen")  # type: ignore[func-returns-value]
    for model in (models.Joined(4, 64, 64), models.Titan(4, 64, 64), models.Titan(4, 64, 64, transposed=False)):
        with pytest.raises(fxshard.ConfigError, match="seen"):
            fxshard.explain(model, args, experts=NAME)
    assert [(case.joined, case.out_by_in) for case in cases] == [(True, True), (False, True), (False, False)]


@pytest.mark.shows("G7")
def test_outside_of_graphs_it_says_where_it_runs(machine: Machine) -> None:
    p = in_blocks(problem([5, 0, 130, 3], hidden=64, inner=64))
    with pytest.raises(fxshard.ConfigError, match=r'experts="te-mxfp8" runs in graphs .* compile the model'):
        fused(p, BLOCKS, implementation=NAME)
