"""The table by which ``experts="auto"`` chooses: what each implementation takes on this device, for a grid of cases.

The operators alone are measured, which is where implementations differ; a dense MLP is measured against what the
compiler makes of it. One that does not import, refuses a case, fails in it or gives another result is left out, with
its reason.
"""

from __future__ import annotations

import gc
import importlib
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch

from fxshard._torch.progress import progress
from fxshard.bench.clock import DeviceClock, take_turns
from fxshard.bench.harness import Column, Row, Table
from fxshard.bench.moe_layer import Contender, Layer, dense, eager, error, make_layer, step
from fxshard.bench.target import UsageError
from fxshard.kernels.case import Case
from fxshard.kernels.choose import refusal
from fxshard.kernels.costs import COMPILER, FOLDER, CostTable, Measurement, device_name
from fxshard.kernels.dense_op import dense_mlp
from fxshard.kernels.glu import SWIGLU
from fxshard.kernels.op import grouped_swiglu

IMPLEMENTATIONS = ("torch", "triton", "te")
"""The implementations that ``"auto"`` may choose; te-mxfp8, which rounds more, has to be asked for."""
TAKE_DENSE = ("triton",)
FARTHEST = 5e-2
"""How far, relative to its norm, a result or gradient may be from torch's own products, in bf16."""


@dataclass(frozen=True)
class Grid:
    """The cases to measure: shapes (experts × hidden × inner) of experts and dense MLPs, each with all ``tokens``."""

    experts: tuple[str, ...]
    dense: tuple[str, ...]
    tokens: tuple[int, ...]
    dense_tokens: tuple[int, ...]

    def cases(self) -> list[tuple[str, int, bool]]:
        grouped = [(shape, tokens, False) for shape in self.experts for tokens in self.tokens]
        return [*grouped, *((shape, tokens, True) for shape in self.dense for tokens in self.dense_tokens)]


CUDA = Grid(
    # Few large experts, fewer larger ones, and many small ones, as models have them.
    experts=("8x4096x2048", "8x4096x14336", "16x1536x896", "64x2048x1408", "128x2048x768"),
    dense=("1x2048x5632", "1x4096x11008"),
    tokens=(8192, 32768),
    dense_tokens=(4096, 16384),
)
CPU = Grid(experts=("4x64x32", "2x96x64"), dense=(), tokens=(32, 64), dense_tokens=())


def measure_costs(grid: Grid, names: Sequence[str], device: str, rounds: int, repeat: int) -> tuple[CostTable, Table]:
    """Every case of a grid, for the table of this device, and the same for people."""
    measurements, left_out, rows = [], dict[str, str](), []
    clock = DeviceClock(device)
    cases = grid.cases()
    with progress(len(cases), lines=True) as begin:
        for shape, tokens, is_dense in cases:
            title = f"{shape}{', dense' if is_dense else ''}, {tokens} tokens"
            begin(title)
            experts, hidden, inner = map(int, shape.split("x"))
            case = Case(torch.device(device), torch.bfloat16, hidden, inner, experts=experts)
            layer = make_layer(experts, hidden, inner, tokens, not is_dense, device)
            contenders = dense_contenders(names, case) if is_dense else grouped_contenders(names, case)
            times, reasons = _measure(layer, contenders, clock, rounds, repeat)
            for name, reason in reasons.items():
                left_out[f"{name}, {title}"] = reason
                print(f"{name} is left out of {title}: {reason}", flush=True)
            if times:
                found = Measurement(is_dense, "bfloat16", experts, hidden, inner, tokens, times)
                measurements.append(found)
                rows.append(_row(title, found))
            del layer, contenders
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    name = device_name(_any_case(device))
    table = CostTable(name, {**_versions(device), **_short(left_out)}, measurements)
    return table, _shown(name, rows, (*names, COMPILER))


def path_of_table(path: Path, device: str) -> Path:
    """A file, or in a folder the one of this device."""
    if path == FOLDER and os.access(path.parent, os.W_OK):
        path.mkdir(exist_ok=True)
    if path.is_dir() or path == FOLDER:
        path /= f"{device_name(_any_case(device))}.json"
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"cannot write {path}: its folder is not there, or may not be written to; name another file")
    return path


def _any_case(device: str) -> Case:
    return Case(torch.device(device), torch.bfloat16, 1, 1)


# -- what is measured --------------------------------------------------------------------------------------------------

Contenders = dict[str, Contender | str]
"""By name; in place of one that cannot run, the reason."""


def grouped_contenders(names: Sequence[str], case: Case) -> Contenders:
    return {name: refusal(name, case) or partial(grouped, name) for name in names}


def dense_contenders(names: Sequence[str], case: Case) -> Contenders:
    torch.compiler.reset()
    found: Contenders = {COMPILER: torch.compile(dense, dynamic=False)}
    wanted = [name for name in names if name in TAKE_DENSE]
    return found | {name: refusal(name, case) or partial(fused_dense, name) for name in wanted}


def grouped(name: str, layer: Layer) -> torch.Tensor:
    weights = (layer.gate_up.mT, None, layer.down.mT, None, None, None)
    out: torch.Tensor = grouped_swiglu(layer.x, layer.offsets, *weights, layer.weights, *astuple(SWIGLU), True, name)[0]
    return out


def fused_dense(name: str, layer: Layer) -> torch.Tensor:
    return dense_mlp(layer.x, layer.gate_up.flatten(0, 1), None, layer.down.flatten(0, 1), name)


def _measure(
    layer: Layer, contenders: Contenders, clock: DeviceClock, rounds: int, repeat: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds of a step, by name, and why the others have none."""
    reasons = {name: made for name, made in contenders.items() if isinstance(made, str)}
    steps: dict[str, Callable[[], object]] = {}
    reference = step(eager, layer)
    for name, contender in contenders.items():
        if isinstance(contender, str):
            continue
        try:
            found = step(contender, layer)
            distance = error(found, reference)
            del found
        except Exception as failure:  # whatever a kernel or a library raises, others can be measured
            reasons[name] = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0]}"
            continue
        if distance <= FARTHEST:
            steps[name] = partial(step, contender, layer)
        else:
            reasons[name] = f"its results are {distance:.2g} away from torch's"
    del reference
    times = take_turns(steps, lambda run: clock.milliseconds(run, repeat), rounds)
    return {name: round(ms, 4) for name, ms in times.items()}, reasons


# -- what is said of it ------------------------------------------------------------------------------------------------


def _row(title: str, found: Measurement) -> Row:
    fastest = min(found.step_ms, key=lambda name: (found.step_ms[name], name))
    times = {f"{name}_ms": ms for name, ms in found.step_ms.items()}
    return {"name": title, **times, **{f"{name}_rate": found.rate(name) for name in found.step_ms}, "fastest": fastest}


def _shown(device: str, rows: list[Row], names: Sequence[str]) -> Table:
    columns: list[Column] = []
    for name in names:
        if any(f"{name}_ms" in row for row in rows):
            columns += [Column(f"{name}_ms", f"{name} ms", ".3f"), Column(f"{name}_rate", "TFLOP/s", ".3g")]
    title = f"A step, forward and backward, on {device}"
    return Table(title, (*columns, Column("fastest", "fastest")), rows)


def _versions(device: str) -> dict[str, str]:
    found = {"date": str(date.today()), "torch": torch.__version__}
    found["device"] = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    for package in ("triton", "transformer_engine"):
        try:
            found[package] = str(importlib.import_module(package).__version__)
        except Exception as error:  # Transformer Engine's fail with all kinds
            found[package] = f"does not import ({type(error).__name__})"
    return found


def _short(left_out: dict[str, str]) -> dict[str, str]:
    """A reason once for all cases of an implementation that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for where, reason in left_out.items():
        name, place = where.split(", ", 1)
        found.setdefault((name, reason), []).append(place)
    return {
        f"without {name}, {len(places)} cases, first {places[0]}": reason for (name, reason), places in found.items()
    }
