"""The examples run, and the documentation's links lead somewhere."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fxshard
from fxshard.inspect.verify import RULES
from fxshard.passes.pipeline import BEFORE_AUTOGRAD, INSERTING

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_llama_on_two_processes() -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    shown = run(*launch, "examples/train_llama.py", "--lowering", "eager", "--steps", "4")
    assert "at the first step" in shown
    assert shown.count("ZeRO-3 on 2 ranks") == 1  # by rank 0 alone
    for event in ("unshard", "wait", "reshard", "grad", "reduce", "finish", "update"):
        assert f" {event} " in shown


def test_huggingface_on_one_process() -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    shown = run("examples/huggingface.py", "--lowering", "eager", "--steps", "6")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_custom_pass() -> None:
    shown = run("examples/custom_pass.py")
    assert "insert_reshard → note_products*" in shown and "behind 14 products" in shown and "after three steps" in shown


def test_train_moe_on_one_process() -> None:
    shown = run("examples/train_moe.py", "--lowering", "eager", "--steps", "12")
    assert "layers.0.experts and 1 more fused by torch" in shown
    assert "Muon" in shown.partition("optimizer")[2]


def test_compare_fsdp2_on_two_processes() -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    shown = run(*launch, "examples/compare_fsdp2.py", "--steps", "2")
    rows = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", shown, flags=re.MULTILINE)
    assert len(rows) == 2 and all(a == b for a, b in rows)
    assert len(set(re.findall(r"holds ([\d.]+) MiB", shown))) == 1


def test_mxfp8_against_bf16() -> None:
    small = ("--quick", "--steps", "3", "--bytes", "20000", "--length", "32", "--batch", "2", "--within", "0.5")
    shown = run("examples/mxfp8_against_bf16.py", *small)
    assert "bf16 step     2" in shown and "MXFP8 step     2" in shown


def test_every_example_is_run_and_says_what_to_look_at() -> None:
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for example in sorted((ROOT / "examples").glob("*.py")):
        assert f"examples/{example.name}" in tests
        docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
        assert "What to look at" in " ".join(docstring.split()), example.name


def test_api_reference_is_what_the_docstrings_say() -> None:
    shown = run("-c", "import sys; sys.path.insert(0, 'docs'); from make_api import page; print(page(), end='')")
    written = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in fxshard.__all__ if not name.startswith("_") and not re.search(rf"\b{name}\b", written)]
    assert not missing
    assert shown == written, "docs/api.md is old: python docs/make_api.py"


def test_every_page_is_in_the_index() -> None:
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#]+\.md)\)", (docs / "index.md").read_text()))
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"index.md"}
    assert pages - linked == set()


def test_inspect_70b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported torch already."""
    page = tmp_path / "schedule.html"
    command = ["inspect_70b.py", "--layers", "2", "--world-size", "64", "--html", str(page)]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(ROOT / "examples" / "inspect_70b.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "ZeRO-3 on 64 ranks" in shown
    assert "simulated on 64 × h200, 2 of 80 layers" in shown
    assert "layers.1.mlp.down.weight" in page.read_text()


def test_show_passes() -> None:
    """What docs/passes.md shows is still what the passes do."""
    shown = set(run("docs/show_passes.py").splitlines())
    text = (ROOT / "docs" / "passes.md").read_text()
    quoted = {line for block in re.findall(r"```\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()}
    assert quoted - shown - {"..."} == set()


def test_every_pass_and_rule_is_documented() -> None:
    passes = {run.__name__ for runs in (BEFORE_AUTOGRAD, *INSERTING.values()) for run in runs}
    headings = set(re.findall(r"^## (\w+)$", (ROOT / "docs" / "passes.md").read_text(), flags=re.MULTILINE))
    assert passes - headings == set()
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
