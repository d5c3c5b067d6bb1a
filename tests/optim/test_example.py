"""The comparison of Muon and AdamW runs, and draws what it says."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent.parent


def test_muon_vs_adamw(tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    done = subprocess.run(
        [sys.executable, "examples/muon_vs_adamw.py", "--quick", "--device", "cpu", "--svg", str(picture)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("after 20 steps") >= 4
    lines = ElementTree.parse(picture).findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [5, 5, 5, 5]
