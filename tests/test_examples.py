"""The examples run, and the documentation's links lead somewhere."""

import ast
import contextlib
import io
import json
import re
import runpy
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from xml.etree import ElementTree

import pytest
import torch.distributed as dist

import fxshard
from fxshard.passes.pipeline import BEFORE_AUTOGRAD, INSERTING, JOINT
from fxshard.schedule.verify import RULES
from tests.pool import Pool

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Here(Protocol):
    def __call__(self, script: str, *options: str) -> str: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """A script as ``python script options`` runs it, but in this process, which has torch loaded."""

    def here(script: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *options])
        runpy.run_path(str(ROOT / script), run_name="__main__")
        return capsys.readouterr().out

    return here


@pytest.mark.thorough
def test_trainer(ranks: Pool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs Accelerate: pip install '.[integrations]'")
    options = ("--lowering", "eager", "--steps", "2", "--layers", "1", "--out", str(tmp_path))
    (shown,) = ranks(1, as_under_torchrun, "examples/trainer.py", *options)
    assert shown.count("loss after 2 steps") == 1
    assert (tmp_path / "final" / "model.safetensors").exists()


def test_train_llama_on_two_processes(ranks: Pool) -> None:
    options = ("--lowering", "eager", "--steps", "2", "--layers", "1")
    shown, silent = ranks(2, as_under_torchrun, "examples/train_llama.py", *options)
    assert silent == ""
    assert "at the first step" in shown
    assert shown.count("ZeRO-3 on 2 ranks") == 1  # by rank 0 alone
    for event in ("unshard", "wait", "reshard", "grad", "reduce", "finish", "update"):
        assert f" {event} " in shown


@pytest.mark.thorough
def test_compare_fsdp2_on_two_processes(ranks: Pool) -> None:
    shown, silent = ranks(2, as_under_torchrun, "examples/compare_fsdp2.py", "--steps", "2")
    rows = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", shown, flags=re.MULTILINE)
    assert len(rows) == 2 and all(a == b for a, b in rows)
    assert len(set(re.findall(r"holds ([\d.]+) MiB", shown))) == 1
    assert silent == ""


def test_tensor_parallel_on_four_processes(ranks: Pool) -> None:
    shown, *silent = ranks(4, as_under_torchrun, "examples/tensor_parallel.py", "eager")
    assert "'up.weight': (_StridedShard(dim=0, sf=2), Shard(dim=0))" in shown
    assert "'down.weight': (Shard(dim=0), Shard(dim=1))" in shown and "ZeRO-3 on 2 ranks" in shown
    assert silent == ["", "", ""]
    assert len((ROOT / "examples" / "tensor_parallel.py").read_text().splitlines()) <= 40


@pytest.mark.thorough
def test_pipeline_parallel_on_four_processes(ranks: Pool) -> None:
    shown = ranks(4, as_under_torchrun, "examples/pipeline_parallel.py", "eager")
    assert [bool(said) for said in shown] == [False, True, False, False]
    accumulate, last = shown[1].split("train:")
    assert "over 4 micro-batches" in accumulate and " reduce " not in accumulate and " reduce " in last


@pytest.mark.thorough
def test_context_parallel_on_two_processes(ranks: Pool) -> None:
    shown, silent = ranks(2, as_under_torchrun, "examples/context_parallel.py", "eager")
    assert "on 32 of 64 tokens" in shown and "ZeRO-3 on 2 ranks, the model itself in world×2" in shown
    assert silent == ""


def as_under_torchrun(script: str, *options: str) -> str:
    """Run an example on this rank of the pool; it finds what torchrun would have told it."""
    about = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "127.0.0.1"}
    about["FXSHARD_PROGRESS"] = "0"  # which some of them set, and leave so
    ports = [_free_port()]
    dist.broadcast_object_list(ports)
    dist.destroy_process_group()
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), forgetting_accelerate():
        for name, value in {**about, "MASTER_PORT": str(ports[0])}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", [script, *options])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return said.getvalue()


@contextlib.contextmanager
def forgetting_accelerate() -> Iterator[None]:
    """What Accelerate remembers of this process is not for the tests after this one."""
    try:
        yield
    finally:
        if (state := sys.modules.get("accelerate.state")) is not None:
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_huggingface_on_one_process(run: Here, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    small = ("--lowering", "eager", "--steps", "4", "--layers", "1")
    shown = run("examples/huggingface.py", *small, "--save", str(tmp_path / "out"))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert "of 16 tokens are those of the sequence" in shown
    assert {"config.json", "model.safetensors"} <= {file.name for file in (tmp_path / "out").iterdir()}


def test_custom_pass(run: Here) -> None:
    shown = run("examples/custom_pass.py")
    assert "insert_reshard → note_products*" in shown and "after 14 products" in shown and "after three steps" in shown


@pytest.mark.thorough
def test_train_moe_on_one_process(run: Here) -> None:
    shown = run("examples/train_moe.py", "--lowering", "eager", "--steps", "12")
    assert "layers.0.experts and 1 more fused by torch" in shown
    assert "Muon" in shown.partition("optimizer")[2]


@pytest.mark.thorough
def test_mxfp8_against_bf16(run: Here) -> None:
    small = ("--quick", "--steps", "3", "--bytes", "20000", "--length", "32", "--batch", "2", "--within", "0.5")
    shown = run("examples/mxfp8_against_bf16.py", *small)
    assert "bf16 step     2" in shown and "MXFP8 step     2" in shown


@pytest.mark.thorough
def test_muon_vs_adamw(run: Here, tmp_path: Path) -> None:
    """It draws what it says."""
    picture = tmp_path / "curves.svg"
    shown = run("examples/muon_vs_adamw.py", "--quick", "--device", "cpu", "--svg", str(picture))
    assert shown.count("after 20 steps") >= 4
    lines = ElementTree.parse(picture).findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [5, 5, 5, 5]


@pytest.mark.thorough
def test_inspect_70b(run: Here, tmp_path: Path) -> None:
    page = tmp_path / "schedule.html"
    shown = run("examples/inspect_70b.py", "--layers", "2", "--world-size", "64", "--html", str(page))
    assert "ZeRO-3 on 64 ranks" in shown
    assert "simulated on 64 × h200, 2 of 80 layers" in shown
    assert "layers.1.mlp.down.weight" in page.read_text()


def test_every_example_is_run_and_says_what_to_look_at() -> None:
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for example in sorted((ROOT / "examples").glob("*.py")):
        assert f"examples/{example.name}" in tests
        docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
        assert "What to look at" in " ".join(docstring.split()), example.name


def test_api_reference_is_what_the_docstrings_say() -> None:
    shown = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["page"]()
    written = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in fxshard.__all__ if not name.startswith("_") and not re.search(rf"\b{name}\b", written)]
    assert not missing
    assert shown == written, "docs/api.md is old: python docs/make_api.py"


def test_every_page_is_in_the_index() -> None:
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#]+\.md)\)", (docs / "index.md").read_text()))
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"index.md"}
    assert pages - linked == set()


def test_show_passes(run: Here) -> None:
    """What docs/passes.md shows is still what the passes do."""
    shown = set(run("docs/show_passes.py").splitlines())
    text = (ROOT / "docs" / "passes.md").read_text()
    quoted = {line for block in re.findall(r"```\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()}
    assert quoted - shown - {"..."} == set()


def test_every_pass_and_rule_is_documented() -> None:
    passes = {run.__name__ for runs in (BEFORE_AUTOGRAD, JOINT, *INSERTING.values()) for run in runs}
    passes |= {"order_prefetch", "keep_resident", "plan_memory", "fill_arena", "split_segments"}
    _, *sections = re.split(r"^## ", (ROOT / "docs" / "passes.md").read_text(), flags=re.MULTILINE)
    shown = {section.split()[0] for section in sections if "```" in section}
    assert passes - shown == set()
    rules = (ROOT / "docs" / "verification.md").read_text()
    assert [rule.__name__ for rule in RULES if f"| `{rule.__name__}` |" not in rules] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    broken = [target for target in targets if not _leads_somewhere(page, target)]
    assert not broken


def _leads_somewhere(page: Path, target: str) -> bool:
    """Whether the file is there, and the heading in it, where the link names one."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not anchor:
        return file.exists()
    headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE) if file.is_file() else []
    return anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.thorough
def test_convergence(run: Here, tmp_path: Path) -> None:
    """Losses of several recipes in one process; the command draws from the file what the script drew."""
    written, drawn, again = (tmp_path / name for name in ("losses.json", "drawn.svg", "again.svg"))
    names = ("adamw", "adamw-seed1")
    small = ("--quick", "--device", "cpu", "--steps", "4", "--recipes", ",".join(names))
    shown = run("examples/convergence.py", *small, "--json", str(written), "--svg", str(drawn))
    runs = json.loads(written.read_text())["runs"]
    assert runs["adamw-seed1"]["losses"] != runs["adamw"]["losses"]
    assert [(len(runs[name]["losses"]), len(runs[name]["held_out"])) for name in names] == [(4, 5)] * 2
    ends = {name: sum(runs[name]["losses"]) / 4 for name in names}
    assert f"| adamw-seed1 | {ends['adamw-seed1']:.4f} |" in shown
    assert f"Two seeds of adamw are {abs(ends['adamw-seed1'] - ends['adamw']):.4f} apart" in shown
    run("fxshard/bench/curves.py", str(written), "--svg", str(again))
    assert again.read_text() == drawn.read_text()
    assert len(ElementTree.parse(drawn).findall(".//{http://www.w3.org/2000/svg}polyline")) == 2
