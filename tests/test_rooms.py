"""The rooms of fxshard: imports point one way, and importing does nothing else."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fxshard

ROOMS = (
    "_torch",
    "kernels",
    "planner",
    "schedule",
    "passes",
    "runtime",
    "optim",
    "frontend",
    "checkpoint",
    "integrations",
    "bench",
    "cli",
)
"""From the lowest to the highest: a room may import from those before it."""

ROOT = Path(fxshard.__file__).parent
ALONE = {"__init__", "__main__", "_version", "fuzz"}
"""Files at the top: the public names, two commands, and the version that all may read."""


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The rooms that a file imports from, wherever the import stands in it. ``fxshard`` is the package itself."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fxshard":
            parts = (node.module or "").split(".")[1:]
            found.update([parts[0]] if parts else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found.update(parts[1] if len(parts) > 1 else "fxshard" for parts in names if parts[0] == "fxshard")
    return found


@pytest.mark.shows("A1")
def test_imports_point_one_way() -> None:
    linked = (ROOT / "passes").glob("*.py")  # which rglob does not follow
    files = [path for path in sorted({*ROOT.rglob("*.py"), *linked}) if room_of(path) not in ALONE]
    assert {room_of(path) for path in files} == set(ROOMS)
    wrong = []
    for path in files:
        own = ROOMS.index(room_of(path))
        above = set(ROOMS[own + 1 :]) | ({"fxshard"} if own < ROOMS.index("checkpoint") else set())
        wrong += [f"{path.relative_to(ROOT)} imports from {room}" for room in sorted(imported(path) & above)]
    assert not wrong, "\n".join(wrong)


def test_lowering_knows_nothing_of_the_rest_of_the_frontend() -> None:
    for path in (ROOT / "frontend" / "lowering").glob("*.py"):
        named = re.findall(r"(?:from|import) fxshard\.frontend\.(\w+)", path.read_text())
        assert set(named) <= {"lowering"}, f"{path.name} imports {named}"


def test_every_room_says_what_it_is_for() -> None:
    for room in ROOMS:
        said = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
        assert said and len(said.splitlines()[0]) <= 118


LOOK = """
import gc, os, sys, threading
import torch, torch._dynamo, torch.distributed
before = (threading.active_count(), gc.get_freeze_count(), gc.get_threshold(), gc.isenabled(), dict(os.environ),
          sys.getrecursionlimit(), sys.getswitchinterval(), torch.get_num_threads(), torch.get_default_dtype(),
          torch.random.get_rng_state().tolist(), sorted(os.listdir("/proc/self/task")), sys.flags, sys.excepthook)
import fxshard.planner.hardware, fxshard
assert callable(fxshard.plan) and set(fxshard.__all__) <= set(dir(fxshard))  # not the package of that name
assert all(hasattr(fxshard, name) for name in fxshard.__all__) and not hasattr(fxshard, "no_such_name")
after = (threading.active_count(), gc.get_freeze_count(), gc.get_threshold(), gc.isenabled(), dict(os.environ),
         sys.getrecursionlimit(), sys.getswitchinterval(), torch.get_num_threads(), torch.get_default_dtype(),
         torch.random.get_rng_state().tolist(), sorted(os.listdir("/proc/self/task")), sys.flags, sys.excepthook)
assert before == after, [pair for pair in zip(before, after) if pair[0] != pair[1]]
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
assert not children, children
print("quiet")
"""


@pytest.mark.shows("A2")
def test_looking_at_public_names_starts_and_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=350)
    assert done.stdout.strip() == "quiet", done.stderr
