"""examples/resume.py: killed in a save, resumed, and its losses are those of a run that was not."""

import contextlib
import importlib.util
import io
import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.forks import fork, load_compiler
from tests.pool import Pool

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "resume.py"
STEPS = 6


def options(folder: Path) -> list[str]:
    return ["--folder", str(folder), "--lowering", "eager", "--steps", str(STEPS), "--every", "2"]


def losses(said: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+)", said)}


def main(*arguments: str) -> None:
    spec = importlib.util.spec_from_file_location("resume", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.CONFIG = replace(example.CONFIG, layers=1)  # half of what there is to compile
    example.main(list(arguments))


def killed(folder: Path, where: str, step: int, *more: str, ranks: int = 2) -> dict[int, str]:
    """Start processes with what torchrun would tell them; one ends by SIGKILL. Returns the losses until then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    says = [folder.parent / f"{where}-{rank}" for rank in range(ranks)]
    environment = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = [*options(folder), "--die-in", where, "--die-at", str(step), *more]
    processes = [fork(says[rank], {**environment, "RANK": str(rank)}, main, *arguments) for rank in range(ranks)]
    for process in processes:
        process.join(timeout=350)
    said = [file.read_text() for file in says]
    assert [process.exitcode for process in processes] == [*[1] * (ranks - 1), -9], said
    return losses(said[0])


def here(folder: Path, *more: str) -> dict[int, str]:
    """Run the example to its end on this rank of the pool."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main(*options(folder), *more)
    return losses(said.getvalue())


@pytest.mark.shows("C1", "C4")
@pytest.mark.timeout(400)
def test_same_losses_as_an_uninterrupted_run(ranks: Pool, tmp_path: Path) -> None:
    straight = ranks(2, here, tmp_path / "straight")[0]
    assert list(straight) == list(range(STEPS))

    load_compiler()
    folder = tmp_path / "killed"
    first = killed(folder, "save", 4)
    assert "step-2" in os.listdir(folder) and "step-4" not in os.listdir(folder)
    second = ranks(2, here, folder)[0]
    assert list(second) == [2, 3, 4, 5]
    assert {**first, **second} == straight
    assert sorted(os.listdir(folder)) == ["step-4", "step-6"]  # keep=2


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_replica_that_is_lost(ranks: Pool, tmp_path: Path) -> None:
    """Two replicas of two shards, one rank is killed: the other three end, and two go on from the last checkpoint."""
    load_compiler()
    folder = tmp_path / "killed"
    first = killed(folder, "step", 5, "--shard-size", "2", ranks=4)
    assert list(first) == [0, 1, 2, 3, 4]
    second = ranks(2, here, folder, "--shard-size", "2")[0]
    assert list(second) in ([2, 3, 4, 5], [4, 5])  # step-2 was complete before step-4 was begun
    assert max(map(float, second.values())) < float(first[0])  # it goes on, it does not begin
