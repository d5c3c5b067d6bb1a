"""The examples run, and the documentation's links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_inspect_70b(tmp_path: Path) -> None:
    page = tmp_path / "schedule.html"
    shown = run("examples/inspect_70b.py", "--layers", "2", "--world-size", "64", "--html", str(page))
    assert "ZeRO-3 on 64 ranks" in shown
    assert "simulated on 64 × h200, 2 of 80 layers" in shown
    assert "layers.1.mlp.down.weight" in page.read_text()


def test_show_passes() -> None:
    """What docs/passes.md shows is still what the passes do."""
    shown = set(run("docs/show_passes.py").splitlines())
    text = (ROOT / "docs" / "passes.md").read_text()
    quoted = {line for block in re.findall(r"```\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()}
    assert quoted - shown - {"..."} == set()


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
