"""``fxshard bench``: what it starts, what it refuses, and the picture it makes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fxshard.bench import command
from fxshard.bench.harness import Chart, Table, read, to_svg, write
from fxshard.bench.train import COLUMNS
from fxshard.cli import main as cli

TRAIN = [
    {"model": "toy", "name": "fsdp2-compile", "step_ms": 20.0, "peak_gib": 0.0, "first_step_s": 9.0, "host_ms": 8.0},
    {"model": "toy", "name": "fxshard", "step_ms": 15.0, "peak_gib": 0.0, "first_step_s": 12.0, "host_ms": 4.0},
]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would run; a train benchmark writes its figures."""
    commands: list[list[str]] = []

    def call(command: list[str], **_: Any) -> int:
        commands.append(command[1:])
        if "--json" in command:
            write(Path(command[command.index("--json") + 1]), [Table("toy", COLUMNS, TRAIN, "fsdp2-compile")])
        return 0

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(command.subprocess, "call", call)
    return commands


def test_starts_its_own_ranks_and_passes_the_rest_on(started: list[list[str]]) -> None:
    assert cli.main(["bench", "train", "--ranks", "3", "--peer", "fsdp2,ddp", "--model", "toy,my:build"]) == 0
    launch = (
        "-m torch.distributed.run --standalone --nproc-per-node 3 "
        "-m fxshard.bench.train --peer fsdp2,ddp --model toy,my:build"
    )
    assert started == [launch.split()]


@pytest.mark.parametrize(
    ("called", "gpus", "ranks"),
    [
        (["train"], 0, "2"),
        (["train"], 1, "1"),
        (["train", "--device", "cuda"], 8, "8"),
        (["train", "--device", "cpu"], 8, "2"),
        (["checkpoint"], 8, "2"),  # which runs on the CPU
    ],
)
def test_ranks_by_default(
    called: list[str], gpus: int, ranks: str, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_gpus", lambda: gpus)
    assert cli.main(["bench", *called]) == 0
    assert started[0][4] == ranks


def test_one_process_where_one_is_enough(started: list[list[str]]) -> None:
    assert cli.main(["bench", "compile-time", "--layers", "2,4"]) == 0
    assert started == [["-m", "fxshard.bench.compile_time", "--layers", "2,4"]]


def test_figures_and_picture(started: list[list[str]], tmp_path: Path) -> None:
    figures, picture = tmp_path / "train.json", tmp_path / "train.svg"
    assert cli.main(["bench", "train", "--json", str(figures), "--svg", str(picture)]) == 0
    assert json.loads(figures.read_text())[0]["rows"] == TRAIN
    texts = [element.text for element in ElementTree.parse(picture).iter(f"{SVG}text")]
    assert "toy: time of a step, ms" in texts and "15   0.750×" in texts
    assert "toy: peak memory, GiB" not in texts  # a CPU run does not measure it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer", "--ranks", "2"], "it runs in one process"),
        (["train", "--ranks", "0"], "1 or more"),
        (["train", "--svg", "no/such/place.svg"], "there is no directory"),
    ],
)
def test_what_cannot_be_asked_for(
    arguments: list[str], message: str, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err and not started


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--peer", "nope"], "bench train: error: argument --peer: no 'nope'; there are fxshard, "),
        (["train", "--contenders=fsdp2,nope"], "no 'nope'"),
        (["train", "--peer"], "expected one argument"),
        (["train", "--model", "1b,2b"], "no '2b'; there are toy, 1b, moe-toy, moe-1b, hf:llama, "),
        (["train", "--model", "hf:bert"], "no 'hf:bert'; there are toy, "),
        (["train", "--rounds", "many"], "invalid int value: 'many'"),
        (["checkpoint", "--contenders", "ddp"], "no 'ddp'; there are fsdp2, "),
    ],
)
def test_arguments_are_checked_before_ranks_are_started(
    arguments: list[str], message: str, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *arguments])
    assert message in capsys.readouterr().err and not started


def test_time_to_the_first_step_beside_a_peer() -> None:
    from fxshard.bench.compile_time import compared

    def row(contender: str, wall: float, cpu: float) -> dict[str, Any]:
        return {
            "model": "1b",
            "loss": 10.25,
            "layers": 8,
            "name": contender,
            "first_step_s": wall,
            "cpu_s": cpu,
            "warm_s": 2.0,
            "warm_cpu_s": 1.0,
        }

    rows = [row("fxshard", 6.0, 9.0), row("fxshard-trace-all", 3.0, 4.0), row("fsdp2-compile", 4.0, 8.0)]
    (table,) = compared(rows)
    title, _, *lines = str(table).splitlines()
    assert title == "1b, 8 layers"
    assert " ".join(lines[0].split()).endswith("6.0 1.500 9.0 1.125 2.0 1.000 1.0 1.000 10.2500")
    assert " ".join(lines[1].split()).endswith("3.0 0.750 4.0 0.500 2.0 1.000 1.0 1.000 10.2500")
    first, again = table.charts()
    assert first.base == "fsdp2-compile" and ("fxshard-trace-all", 2.0) in again.bars


def test_rounds_of_the_first_step() -> None:
    """Medians of figures and of clocks."""
    from fxshard.bench.compile_time import median

    rounds = [{"layers": 8, "first_step_s": s, "stages": {"read": 1.0} if s < 5 else {}} for s in (9.0, 4.0, 6.0)]
    assert median(rounds) == {"layers": 8, "first_step_s": 6.0, "stages": {"read": 0.0}}


def test_stages_of_a_first_and_a_second_start() -> None:
    from fxshard.bench.compile_time import stages

    clocks = {"capture": 2.0, "joint": 3.0, "next to nothing": 0.01}
    said = stages([{"layers": 8, "name": "fxshard", "stages": clocks, "warm_stages": {"capture": 1.5, "read": 0.2}}])
    title, *lines = said.strip().splitlines()
    assert title.startswith("fxshard, 8 layers") and title.split()[-2:] == ["first", "second"]
    assert [line.split() for line in lines] == [
        ["joint", "3.00", "s", "0.00", "s"],
        ["capture", "2.00", "s", "1.50", "s"],
        ["read", "0.00", "s", "0.20", "s"],
    ]


def test_under_torchrun(started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["bench", "train"]) == 2 and not started


def test_bars_are_as_long_as_their_values() -> None:
    chart = Chart("time", "ms", (("peer <1>", 4.0), ("fxshard", 1.0)), "peer <1>")
    tree = ElementTree.fromstring(to_svg([chart], "a & b"))
    lengths = {bar.get("class"): float(bar.get("width", "0")) for bar in tree.iter(f"{SVG}rect")}
    assert lengths["peer"] == 4 * lengths["ours"]
    assert {"peer <1>", "fxshard", "a & b"} <= {element.text for element in tree.iter(f"{SVG}text")}


def test_a_real_one_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fxshard.bench import optimizer

    figures = tmp_path / "optimizer.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu", "--json", str(figures)])
    monkeypatch.setattr(optimizer, "ROUNDS", 1)
    monkeypatch.setattr(optimizer, "REPEAT", 1)
    optimizer.main()
    (chart,) = [chart for table in read(figures) for chart in table.charts()]
    assert {name for name, _ in chart.bars} > {"fxshard.Muon", "torch.optim.Muon"}


@pytest.mark.thorough
def test_tables_of_planning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Costs are measured in a process of their own, printed and written, and become bars."""
    from fxshard.bench import planning

    planning.main(["--parts", "layers", "--layers", "1", "--json", str(tmp_path / "cost.json")])
    (table,) = read(tmp_path / "cost.json")
    assert table.rows[0]["name"] == "1 layers" and table.rows[0]["seconds"] > 0
    assert f"### {table.title}\n\n|  | seconds | " in capsys.readouterr().out
    (chart,) = table.charts()
    assert chart.bars == (("1 layers", table.rows[0]["seconds"]),)
