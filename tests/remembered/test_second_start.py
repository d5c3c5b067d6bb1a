"""Second starts with Inductor: they run the code that it wrote at the first, and do not import its compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard import _compat
from fxshard.helpers import beside
from tests.pool import forget

ROOT = Path(__file__).parents[2]
COMPILER = ("torch._inductor.lowering", "torch._inductor.decomposition", "torch._inductor.compile_fx")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with nothing in it, that is used."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FXSHARD_REMEMBER", "1")


class Products(nn.Module):
    """Layers that repeat, and nothing that takes a compiler of C++."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(6))
        for layer in self.layers:
            layer.weight.data = torch.randn(width, width, generator=generator) / 3

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Results of two steps, and parameters behind them."""
    x = torch.randn(4, next(model.parameters()).shape[-1], generator=torch.Generator().manual_seed(1))
    results = []
    for _ in range(2):
        optimizer.zero_grad()
        results.append(model(x))
        results[-1].backward(torch.ones_like(x))
        optimizer.step()
    return [value.detach() for value in (*results, *model.parameters())]


@dataclass
class Started:
    loaded: int
    """Segments that were loaded as an earlier start left them."""
    compiled: int


def start(between: dict[str, Any] | None = None) -> Started:
    """A step of a program that has just started, which sets something between forward and backward."""
    forget()
    model = fxshard.compile(Products(), optimizer=fxshard.AdamW(), lowering="inductor")
    loaded: list[Any] = []
    load, compile = _compat.load_generated, _compat.inductor_compile

    def noted(*args: Any) -> Any:
        loaded.append(load(*args))
        return loaded[-1]

    with (
        mock.patch.object(_compat, "load_generated", noted),
        mock.patch.object(_compat, "inductor_compile", wraps=compile) as compiled,
    ):
        result = model(torch.ones(4, 8))
        with torch._inductor.config.patch(between or {}):
            result.backward(torch.ones(4, 8))
        model.optimizer.step()
    beside.finish_all()
    return Started(sum(each is not None for each in loaded), compiled.call_count)


def test_what_is_set_between_forward_and_backward_counts_for_backward() -> None:
    marked = {"profiler_mark_wrapper_call": True}
    all_of_it = start(marked).compiled
    second = start()  # without the marks
    assert second.compiled > 0 and second.loaded + second.compiled == all_of_it
    assert start() == Started(all_of_it, 0)  # what was compiled anew is noted, too
    assert start(marked).loaded == second.loaded


def test_what_could_not_be_noted_at_first_is_noted_later() -> None:
    with torch._inductor.config.patch({"fx_graph_cache": False}):
        all_of_it = start().compiled
    assert start() == Started(0, all_of_it)
    assert start() == Started(all_of_it, 0)


def program() -> None:
    """A program that trains two models, and says whether that imported a compiler, and what the second one is.

    Plain torch comes to the same, to the bit.
    """
    torch.set_num_threads(1)
    same = True
    for width in (16, 8):
        model = fxshard.compile(Products(width), optimizer=fxshard.AdamW(lr=1e-2), lowering="inductor")
        left = trained(model, model.optimizer)
        imported = [name for name in COMPILER if name in sys.modules]
        beside.finish_all()
        plain = Products(width)
        expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
        same &= all(torch.equal(a.reshape(-1), b.reshape(-1)) for a, b in zip(left, expected, strict=True))
    graphs = {phase: str(graph.graph) for phase, graph in model.graphs.items()}
    print(json.dumps([imported, same, model.compilations.layers_left_out, str(model.schedule), graphs]))


@pytest.mark.timeout(180)
def test_a_second_start_imports_no_compiler() -> None:
    def run() -> Any:
        code = "from tests.remembered.test_second_start import program; program()"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run(), run()
    assert first[:3] == [list(COMPILER), True, 2]
    assert second == [[], *first[1:]]
