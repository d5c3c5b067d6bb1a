"""The examples run, and the documentation's links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_train_llama_on_two_processes() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("examples/train_llama.py", "--lowering", "eager", "--steps", "4"),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "at the first step" in done.stdout
    assert done.stdout.count("ZeRO-3 on 2 rank(s)") == 1  # by rank 0 alone
    for event in ("unshard", "wait", "reshard", "grad", "reduce", "finish"):
        assert f" {event} " in done.stdout


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
