"""The command line, with a plan drawn by hand in place of a real one."""

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard._torch.errors import ConfigError
from fxshard.bench.presets import PRESETS, Moe, MoeConfig
from fxshard.cli import inspection
from fxshard.cli import main as cli
from fxshard.passes.budget_trades import Trade
from fxshard.planner.hardware import PRESETS as HARDWARE
from fxshard.schedule.files import from_json
from fxshard.schedule.offloads import Recomputed
from tests.inspect.schedules import drawn


class Planned(list[dict[str, Any]]):
    """The calls of `fxshard.plan`."""


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    calls = Planned()

    def plan(model: nn.Module, example_inputs: Any, **options: Any) -> Any:
        calls.append({"model": model, "inputs": example_inputs, **options})
        if options["memory_budget"] == "1KiB":
            raise ConfigError("memory_budget: 1 KiB is too little; the smallest feasible is 11.5 MiB")
        return drawn(layers=6, ranks=options["world_size"])

    def sweep(model: nn.Module, example_inputs: Any, **options: Any) -> Any:
        calls.append({"model": model, "inputs": example_inputs, **options})
        again = (Recomputed("layers.*.mlp.up mm", 5, 2**20, 1e-3),)
        return Trade(2**30, 0.2, 2**20, again), Trade(2**31, 0.1, 2**21, ())

    module = ModuleType("fxshard.frontend.planning")
    module.plan, module.sweep = plan, sweep  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fxshard.frontend.planning", module)
    return calls


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the user's, with a module of factories."""
    (tmp_path / "mine.py").write_text(
        "import json, torch\n"
        "def build(layers=2):\n    return torch.nn.Linear(layers, 3), (torch.ones(1, 2),)\n"
        "def named():\n    return torch.nn.Linear(2, 3), {'input': torch.ones(1, 2)}\n"
        "def bare():\n    return torch.nn.Linear(2, 3)\n"
        "def number():\n    return 3\n"
        "def fails():\n    return json.loads('{')\n"
    )
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("mine", None)
    return tmp_path


def test_inspect_prints_table_and_figures(planned: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["inspect", "llama-8b", "--layers", "2", "--world-size", "1024", "--zero", "2", "--budget", "60GiB"])
        == 0
    )
    out = capsys.readouterr().out
    assert "ZeRO-3 on 1024 ranks" in out and "simulated on h200: step" in out and "\x1b[" not in out
    (call,) = planned
    assert (call["world_size"], call["zero"], call["memory_budget"], call["hardware"]) == (1024, 2, "60GiB", "h200")
    assert call["precision"].param is torch.bfloat16 and call["optimizer"] is None
    assert all(p.is_meta for p in call["model"].parameters()) and len(call["model"].layers) == 2


def test_a_sweep_prints_step_time_over_budgets(planned: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "llama-8b", "--layers", "1", "--sweep"]) == 0
    *_, tight, loose = capsys.readouterr().out.splitlines()
    assert tight.split()[:6] == ["1.00", "GiB", "200.00", "ms", "1.0", "MiB"] and tight.endswith("layers.*.mlp.up mm")
    assert loose.split()[:4] == ["2.00", "GiB", "100.00", "ms"] and loose.endswith("nothing")
    assert loose.count("█") == 15 and tight.count("█") == 30
    assert len(planned) == 1


def test_a_sweep_is_a_page_too(planned: Planned, tmp_path: Path) -> None:
    """The curve has both budgets, the table what each decides."""
    assert cli.main(["inspect", "llama-8b", "--layers", "1", "--sweep", "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "<title>1.00 GiB: 200.00 ms</title>" in page and "<title>2.00 GiB: 100.00 ms</title>" in page
    assert 'points="70.0,70.0 830.0,70.0 830.0,180.0"' in page  # down to half the height at the second budget
    assert "<td>layers.*.mlp.up mm</td>" in page and "<td>nothing</td>" in page and "The device has 131" in page
    assert "llama-8b · 1 layers (--layers) · inputs of 1 × 4096" in page


def test_activations_are_those_of_compile(planned: Planned) -> None:
    tight = ["inspect", "llama-8b", "--layers", "1", "--budget", "60GiB"]
    assert cli.main(tight) == cli.main([*tight, "--activations", "recompute"]) == 0
    assert cli.main(["inspect", "llama-8b", "--layers", "1", "--sweep", "--activations", "offload"]) == 0
    assert [call["activations"] for call in planned] == ["auto", "recompute", "offload"]


def test_a_budget_says_what_was_decided(
    monkeypatch: pytest.MonkeyPatch, planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    again = (Recomputed("layers.*.mlp.up mm", 5, 2**20, 1e-3),)
    schedule = replace(drawn(layers=6), budget=2**40, recomputed=again)
    monkeypatch.setattr(sys.modules["fxshard.frontend.planning"], "plan", lambda *_, **__: schedule)
    assert cli.main(["inspect", "llama-8b", "--layers", "1", "--budget", "60GiB"]) == 0
    out = capsys.readouterr().out
    assert "layers.*.mlp.up mm: 5 values in the layers that were traced, 1.0 MiB not saved for 1.00 ms" in out
    assert "computed again in backward: layers.*.mlp.up mm" in out


@pytest.mark.parametrize(("name", "kind"), [("adamw", fxshard.AdamW), ("muon", fxshard.Muon)])
def test_inspect_with_an_optimizer(name: str, kind: type, planned: Planned) -> None:
    assert cli.main(["inspect", "llama-8b", "--layers", "1", "--optimizer", name]) == 0
    assert isinstance(planned[0]["optimizer"], kind)
    kept = ["--state", "8bit", "--offload", "host"]
    assert cli.main(["inspect", "llama-8b", "--layers", "1", "--optimizer", name, *kept]) == 0
    assert (planned[1]["optimizer"].state, planned[1]["optimizer"].offload) == ("8bit", "host")
    assert cli.main(["inspect", "llama-8b", "--layers", "1", *kept]) == 2


def test_inspect_writes_files(planned: Planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data, trace = tmp_path / "a.html", tmp_path / "a.json", tmp_path / "t.json"
    files = ["--html", str(page), "--json", str(data), "--trace", str(trace)]
    assert cli.main(["inspect", "llama-8b", "--layers", "1", *files]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert from_json(data.read_text()) == drawn(layers=6, ranks=8)
    assert json.loads(trace.read_text())["traceEvents"]
    assert f"wrote {page}" in capsys.readouterr().err


def test_json_alone_goes_to_stdout(planned: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "llama-8b", "--layers", "1", "--json"]) == 0
    assert from_json(capsys.readouterr().out) == drawn(layers=6, ranks=8)


@pytest.mark.parametrize("target", ["mine:build", "mine.py:build"])
def test_a_factory_of_the_users(target: str, planned: Planned, models: Path) -> None:
    assert cli.main(["inspect", target, "--layers", "4", "--precision", "model"]) == 0
    assert planned[0]["model"].in_features == 4 and len(planned[0]["inputs"]) == 1
    assert planned[0]["precision"] is None


def test_a_factory_with_keyword_inputs(planned: Planned, models: Path) -> None:
    assert cli.main(["inspect", "mine:named"]) == 0
    assert {name: tuple(value.shape) for name, value in planned[0]["inputs"].items()} == {"input": (1, 2)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.py"], "needs the name of a function in it: mine.py:build"),
        (["llama-9b"], "unknown preset 'llama-9b'; known are llama-8b, llama-70b, moe-16b"),
        (["llama-8b", "--hardware", "abacus"], "known are a100, h100, h200"),
        (["llama-8b", "--layers", "1", "--budget", "1KiB"], "the smallest feasible is 11.5 MiB"),
        (["llama-8b", "--layers", "1", "--activations", "offload"], "add --budget SIZE or --sweep"),
        (["llama-8b", "--layers", "1", "--sweep", "--json", "-"], "--sweep has no schedule to write"),
        (["nowhere:build"], "there is no module 'nowhere'"),
        (["nowhere.py:build"], "there is no file nowhere.py"),
        (["mine:biuld"], "mine has no function 'biuld'; its functions are build, named, bare, number, fails"),
        (["mine:bare"], "forward takes input: return (module, example_inputs)"),
        (["mine:number"], "returned a int; expected an nn.Module"),
        (["torch.nn:Linear"], "takes in_features, out_features: give a function that needs no arguments"),
        (["mine:bare", "--layers", "3"], "takes no argument 'layers'"),
        (["llama-8b", "--html", "no/such/place.html"], "there is no directory"),
    ],
)
def test_what_cannot_be_asked_for(
    arguments: list[str], message: str, planned: Planned, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and not captured.out


def test_a_factory_that_fails_shows_its_own_frames(
    planned: Planned, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", "mine:fails"]) == 1
    error = capsys.readouterr().err
    assert "mine.py" in error and "json.loads('{')" in error and "JSONDecodeError" in error
    assert "cli.py" not in error and "decoder.py" not in error and "left out" in error


def test_a_module_that_fails_to_import(planned: Planned, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "broken:build"]) == 1
    error = capsys.readouterr().err
    assert "broken.py" in error and "a_module_that_is_not_there" in error and "importlib" not in error


def test_demo(planned: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo"]) == 0
    assert "ZeRO-3 on 8 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "llama-8b", "--zero", "4"], ["demo", "--loud"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2 and "usage: fxshard" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0 and torch.__version__ in capsys.readouterr().out


def test_help_needs_no_torch() -> None:
    script = (
        "import sys\n"
        "from fxshard.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert "inspect" in done.stdout


def test_progress_counts_the_stages_of_planning() -> None:
    from fxshard.frontend.planning import STAGES

    assert len(STAGES) == inspection.PLANNING
    seen: list[str] = []
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    fxshard.plan(model, (torch.ones(2, 4),), world_size=2, lowering="eager", progress=seen.append)
    assert tuple(seen) == STAGES


@pytest.mark.parametrize(("name", "billions"), [("llama-8b", 8.03), ("llama-70b", 70.55), ("moe-16b", 15.96)])
def test_presets_have_the_size_they_say(name: str, billions: float) -> None:
    model, inputs = PRESETS[name]()
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    assert all(p.is_meta for p in model.parameters()) and [tuple(x.shape) for x in inputs] == [(1, 4096)] * 2


@pytest.mark.thorough
def test_the_mixture_of_experts_is_one_graph_and_trains() -> None:
    shapes = {"vocab": 50, "dim": 32, "layers": 2, "heads": 2, "latent": 16, "head_dim": 8, "rope_dim": 4}
    model = Moe(MoeConfig(**shapes, dense_hidden=40, experts=8, active=2, hidden=12))
    tokens = torch.randint(50, (2, 16))
    torch.compile(model, backend="aot_eager", fullgraph=True)(tokens, tokens).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_help_names_the_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    """It is written out there, because looking it up would import torch."""
    with pytest.raises(SystemExit):
        cli.main(["inspect", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in HARDWARE)


def test_nothing_asked_for_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "inspect" in capsys.readouterr().out


def test_from_a_checkout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m fxshard``, where nothing is installed."""
    monkeypatch.setattr(sys, "argv", ["fxshard", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fxshard", run_name="__main__")
    assert ended.value.code == 0 and fxshard.__version__ in capsys.readouterr().out
