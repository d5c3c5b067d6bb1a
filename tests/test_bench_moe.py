"""The benchmark of experts: device and host are two figures, and both are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fxshard.bench import clock, expert_costs, moe, products
from fxshard.bench.harness import Table, read
from fxshard.kernels import choose, costs
from fxshard.kernels.by_torch import TorchExperts
from fxshard.kernels.case import Case
from fxshard.kernels.costs import COMPILER


def test_figures_of_a_contender() -> None:
    layer = moe.make_layer(2, 16, 16, 8, True, "cpu")
    figures = moe.measure(layer, {"eager": moe.eager, "again": moe.eager}, rounds=2, repeat=1)
    for found in figures:
        assert found["error"] == 0
        assert min(found[f"{what}_ms"] for what in ("forward", "step", "host")) > 0
    table = Table("", moe.COLUMNS, figures, "eager")
    assert table.cells(figures[1])[4] == f"{figures[1]['step_ms'] / figures[0]['step_ms']:.3f}"


@pytest.mark.thorough
def test_one_expert_is_a_dense_mlp(capsys: pytest.CaptureFixture[str]) -> None:
    layer = moe.make_layer(1, 16, 24, 8, True, "cpu")
    assert moe.error((moe.dense(layer),), (moe.eager(layer),)) < 1e-2
    case = Case(torch.device("cpu"), torch.bfloat16, 16, 24)
    names = ["dense", "dense-fused"]
    contenders = moe._contenders(names, case, 1)
    assert set(contenders) == {"eager", *names}
    for name in names:
        assert moe.error((contenders[name](layer),), (moe.eager(layer),)) < 1e-2
    assert set(moe._contenders(names, case, 2)) == {"eager"}
    assert capsys.readouterr().out.count("these are 2") == 2


class Twice(TorchExperts):
    """Wrong by a factor of two where weights are differentiated."""

    def weight_gradient(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return 2 * super().weight_gradient(a, b, offsets)


def test_products_one_by_one() -> None:
    layer = moe.make_layer(2, 16, 24, 8, False, "cpu")
    asked = products.products(layer.x.detach(), layer.offsets, layer.gate_up.detach(), layer.down.detach())
    shapes = {product.name: tuple(product.run(TorchExperts()).shape) for product in asked}
    assert list(shapes.values()) == [(8, 24), (8, 16), (8, 24), (8, 16), (2, 48, 16), (2, 16, 24)]
    table = products.measure(asked, {"torch": TorchExperts(), "twice": Twice()}, "cpu", rounds=2, repeat=1)
    assert [found["error"] for found in table.rows] == [0, 0, 0, 0, 1, 1]
    assert all(min(found["torch_us"], found["twice_us"]) > 0 for found in table.rows)
    assert table.head == ["", "torch µs", "TFLOP/s", "twice µs", "TFLOP/s", "error"]


def test_products_of_one_expert_without_groups() -> None:
    layer = moe.make_layer(1, 16, 24, 8, False, "cpu")
    case = Case(torch.device("cpu"), torch.bfloat16, 16, 24)
    table = moe._kernels(layer, case, rounds=1, repeat=1)
    assert all({"dense_us", "torch_us"} < found.keys() and found["error"] < 1e-2 for found in table.rows)


def test_the_host_is_a_chart_of_its_own() -> None:
    rows = [{"name": name, "step_ms": 4.0, "host_ms": host} for name, host in (("eager", 0.6), ("triton", 1.2))]
    step, host = Table("8x4096x2048", moe.COLUMNS, rows, "eager").charts()
    assert step.bars == (("eager", 4.0), ("triton", 4.0)) and host.bars == (("eager", 0.6), ("triton", 1.2))


class Device:
    """A GPU that takes one millisecond for a product, and a host that takes five to launch ten calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.products: list[int] = []
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None: ...
            def record(self) -> None: ...
            def synchronize(self) -> None: ...
            def elapsed_time(self, other: Event) -> float:
                return 20.0

            def query(self) -> bool:
                return device.products[-1] <= 5

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.products.append(0))
        monkeypatch.setattr(torch, "mm", self.multiply)
        monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.empty(0))

    def multiply(self, *_: Any, out: torch.Tensor) -> None:
        self.products[-1] += 1


def test_calls_are_queued_before_the_first_of_them_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    timer = clock.DeviceClock("cuda")
    assert timer.milliseconds(lambda: None, 10) == timer.milliseconds(lambda: None, 10) == 2.0
    assert device.products == [4, 8, 8]  # four were too few, and that is not forgotten


def test_calls_that_wait_are_timed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(torch.cuda.Event, "query", lambda self: True)
    assert clock.DeviceClock("cuda").milliseconds(lambda: None, 10) == 2.0
    assert device.products == [4, 8, 16, 32, 64]


class Fails(TorchExperts):
    def weight_gradient(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image\nis available")


@pytest.mark.shows("G7")
def test_costs_of_what_runs_and_why_the_rest_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    grid = expert_costs.Grid(("2x16x24", "4x8x8"), (), (8, 16), ())
    made = {"fails": Fails, "twice": Twice, "refuses": TorchExperts}
    refusals = {"fails": lambda case: None, "twice": lambda case: None, "refuses": lambda case: "no such gate"}
    with mock.patch.dict(choose._MAKE, made), mock.patch.dict(choose._REFUSALS, refusals):
        table, shown = expert_costs.measure_costs(grid, ("torch", *made), "cpu", rounds=1, repeat=1)
    assert [(found.shape, found.tokens) for found in table.measurements] == [
        *(((2, 16, 24), 8), ((2, 16, 24), 16), ((4, 8, 8), 8), ((4, 8, 8), 16))
    ]
    assert all(set(found.step_ms) == {"torch"} and not found.dense for found in table.measurements)
    assert table.device == "cpu" and table.made["torch"] == torch.__version__
    reasons = {key.split(",")[0]: reason for key, reason in table.made.items() if key.startswith("without")}
    away = reasons.pop("without twice")
    assert away.startswith("its results are ") and away.endswith(" away from torch's")
    assert reasons == {"without fails": "RuntimeError: no kernel image", "without refuses": "no such gate"}
    assert "refuses is left out of 4x8x8, 16 tokens: no such gate" in capsys.readouterr().out
    assert shown.head == ["", "torch ms", "TFLOP/s", "fastest"] and len(shown.rows) == 4


def test_a_dense_mlp_is_measured_against_the_compiler() -> None:
    case = Case(torch.device("cpu"), torch.bfloat16, 16, 24)
    found = expert_costs.dense_contenders(["torch", "triton"], case)
    assert callable(found[COMPILER]) and found["triton"] == "they are on cpu, its kernels need a CUDA device"
    assert set(found) == {COMPILER, "triton"}  # of the two, the one that takes dense MLPs
    takes = [name for name in expert_costs.IMPLEMENTATIONS if choose.implementation(name).takes_dense]
    assert tuple(takes) == expert_costs.TAKE_DENSE
    layer = moe.make_layer(1, 16, 24, 8, False, "cpu")
    assert moe.error((expert_costs.fused_dense("torch", layer),), (moe.dense(layer),)) < 1e-2


def test_the_command_writes_the_table_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moe, "CPU", expert_costs.Grid(("2x16x24",), (), (8, 16), ()))
    monkeypatch.setattr(moe, "CUDA", moe.CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = ["moe", "--rounds", "1", "--repeat", "1", "--write", str(tmp_path), "--json", str(tmp_path / "figures")]
    monkeypatch.setattr("sys.argv", given)
    moe.main()
    path = tmp_path / "cpu.json"
    table = costs.read(path)
    assert {(found.shape, found.tokens) for found in table.measurements} == {((2, 16, 24), 8), ((2, 16, 24), 16)}
    assert len(read(tmp_path / "figures")[0].rows) == 2
    with mock.patch.dict(costs._ADDED):
        costs.add_table(path)
        found = choose.choose("auto", Case(torch.device("cpu"), torch.bfloat16, 64, 64, experts=8))
    assert found.name == "torch" and found.why.startswith("measured on cpu for 2 × 16 × 24 with 8 and 16 tokens: torch")
    for wrong, said in (
        (["--write", str(tmp_path / "no" / "x.json")], "its folder is not there"),
        (["--kernels"], "own"),
    ):
        monkeypatch.setattr("sys.argv", [*given, *wrong])
        with pytest.raises(SystemExit):
            moe.main()
        assert said in capsys.readouterr().err
