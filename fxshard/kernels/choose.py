"""Which implementation runs experts on this machine, and why another one cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from fxshard._torch.errors import ConfigError
from fxshard.kernels.by_te import TransformerEngineExperts, engine_refusal
from fxshard.kernels.by_torch import TorchExperts
from fxshard.kernels.case import Case
from fxshard.kernels.costs import COMPILER, Nearest, device_name, nearest
from fxshard.kernels.te_gates import fused_mlp_refusal
from fxshard.kernels.te_mlp import TeMxfp8Experts


def choices() -> tuple[str, ...]:
    """Values of the option ``experts``: the fastest that runs here, one by name, or the model as it is written."""
    return ("auto", *_MAKE, "off")


def add_implementation(
    name: str, make: Callable[[], TorchExperts], refuses: Callable[[Case], str | None] = lambda case: None
) -> None:
    """Add an implementation of your own, chosen by ``experts=name``.

    ``make`` gives a :class:`TorchExperts` that replaces some of its steps and says which ``alignment`` it wants, and
    whether it ``takes_dense`` MLPs, too;
    ``refuses`` says why it cannot run something, or None.

    >>> add_implementation("mine", MyExperts)
    >>> model = fxshard.compile(model, experts="mine")
    """
    if name in choices():
        raise ConfigError(f"experts={name!r} is taken: {', '.join(map(repr, choices()))} are there already")
    _MAKE[name], _REFUSALS[name] = make, refuses


@cache
def implementation(name: str) -> TorchExperts:
    """The implementation of that name. Whether it can run is asked of ``refusal``."""
    return _MAKE[name]()


def refusal(name: str, case: Case) -> str | None:
    """The first gate that keeps an implementation from running this, or None."""
    return _REFUSALS[name](case)


@dataclass(frozen=True)
class Choice:
    """An implementation, and how it was chosen."""

    name: str
    why: str = ""
    """What it was compared with, at what measured cost; empty where it was asked for."""


def choose(requested: str, case: Case) -> Choice:
    """The implementation to use. One that was asked for and cannot run is an error that names the gate."""
    if requested == "auto":
        return _fastest(case)
    reason = refusal(requested, case)
    if reason is not None:
        raise ConfigError(f'experts="{requested}" cannot run these experts: {reason}; use experts="auto"')
    return Choice(requested)


def choose_dense(requested: str, case: Case) -> tuple[Choice, str | None]:
    """The implementation for a dense MLP, as a single expert, and why it is better left to the compiler, or None.

    Unlike with experts, a refusal is no error. The number of rows does not count, although few of them do not pay:
    ranks with different numbers would have different schedules.
    """
    if requested == "auto":
        measured = nearest(case, dense=True)
        if measured is not None:
            return _fastest_dense(case, measured)
    choice = _first_that_runs(case) if requested == "auto" else Choice(requested)
    reason = refusal(choice.name, case)
    if reason is None and not implementation(choice.name).takes_dense:
        reason = "there is nothing to group, and the compiler fuses its activation"
    return choice, reason


def _fastest(case: Case) -> Choice:
    """By what was measured; where nothing was, in a fixed order."""
    measured = nearest(case)
    if measured is None:
        return _first_that_runs(case)
    slower: dict[str, float] = dict(measured.rates)
    passed: list[str] = []
    # Refusals are asked for in this order, and no further than necessary: some import large packages to know.
    for name, rate in measured.rates.items():
        del slower[name]
        reason = _left_out(name) or refusal(name, case)
        if reason is None:
            others = [*passed, *(f"{other} {at:.3g}" for other, at in slower.items())]
            others += [f"{other} not measured" for other in _MAKE if other not in measured.rates]
            return Choice(name, f"{measured}: {name} {rate:.3g} TFLOP/s, {', '.join(others)}")
        passed.append(f"{name} {rate:.3g} ({reason})")
    return _first_that_runs(case, f"{measured}, {', '.join(passed) or 'none with all of them'}")


def _left_out(name: str) -> str | None:
    if name in _ROUNDS_MORE:
        return "only where it is asked for: it rounds more"
    return None if name in _MAKE else "not there"


def _fastest_dense(case: Case, measured: Nearest) -> tuple[Choice, str | None]:
    runs = [name for name in measured.rates if name in _MAKE and refusal(name, case) is None]
    name = next((each for each in runs if implementation(each).takes_dense), None)
    if name is None:
        return Choice(COMPILER), "no implementation that was measured for dense MLPs runs it, and the compiler does"
    mine, compiled = measured.rates[name], measured.rates.get(COMPILER, 0.0)
    rates = f"{name} {mine:.3g} TFLOP/s, the compiler {compiled:.3g}"
    if compiled > mine * MARGIN:
        return Choice(name), f"the compiler is faster as {measured}: {rates}"
    return Choice(name, f"{measured}: {rates}"), None


def _first_that_runs(case: Case, measured: str = "") -> Choice:
    name = next(name for name in _FASTEST_FIRST if refusal(name, case) is None)
    dtype = str(case.dtype).removeprefix("torch.")
    found = measured or f"nothing was measured on {device_name(case)} in {dtype}"
    return Choice(name, f"{found}: the first of {', '.join(_FASTEST_FIRST)} that runs")


def _triton() -> TorchExperts:
    from fxshard.kernels.by_triton import TritonExperts

    return TritonExperts()


def _triton_refusal(case: Case) -> str | None:
    from fxshard.kernels import hopper_products

    planned = case.planned_for
    reason = hopper_products.capability_refusal(*planned) if planned else hopper_products.refusal(case.device)
    if reason is not None:
        return reason
    if case.dtype != torch.bfloat16:
        return f"its kernels compute in bfloat16, they are {case.dtype}"
    if case.biased:
        return "its kernels add no bias"
    if case.glu.interleave:
        return f"its kernels take gate and up as halves, they alternate every {case.glu.interleave}"
    depth, least = hopper_products.DEPTH, hopper_products.SHALLOWEST
    if case.hidden % depth or case.hidden < least or case.inner % 8:
        wanted = f"a multiple of {depth} and at least {least}, and inner size {case.inner} a multiple of 8"
        return f"hidden size {case.hidden} must be {wanted}"
    return None


def _te_refusal(case: Case) -> str | None:
    if case.device.type != "cuda":
        return f"they are on {case.device.type}, Transformer Engine needs a CUDA device"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"Transformer Engine's grouped GEMM takes 16-bit types, they are {case.dtype}"
    if case.hidden % 8 or case.inner % 8:
        return f"hidden size {case.hidden} and inner size {case.inner} must be multiples of 8"
    if case.glu.interleave % 32:
        return f"Transformer Engine alternates gate and up every 32 columns, they do every {case.glu.interleave}"
    return engine_refusal()


_MAKE: dict[str, Callable[[], TorchExperts]] = {
    "torch": TorchExperts,
    "triton": _triton,
    "te": TransformerEngineExperts,
    "te-mxfp8": TeMxfp8Experts,
}
_REFUSALS: dict[str, Callable[[Case], str | None]] = {
    "torch": lambda case: None,
    "triton": _triton_refusal,
    "te": _te_refusal,
    "te-mxfp8": fused_mlp_refusal,
}
_FASTEST_FIRST = ("triton", "torch")
"""For devices of which there is no table. The last one runs everywhere."""
_ROUNDS_MORE = ("te-mxfp8",)
"""Never chosen for their time: results would depend on the device by more than the rounding of the model's dtype."""
MARGIN = 1.03
"""How much faster the compiler must be to get a dense MLP: its form saves the activation for backward as well, half as
much again as an implementation that computes it anew."""
