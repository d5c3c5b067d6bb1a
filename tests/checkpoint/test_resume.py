"""examples/resume.py: killed in a save and in a step, resumed, and its losses are those of a run that was not."""

import contextlib
import os
import re
import runpy
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.pool import Pool, RankError

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "resume.py"
STEPS = 6


def options(folder: Path) -> list[str]:
    return ["--folder", str(folder), "--lowering", "eager", "--steps", str(STEPS), "--every", "2"]


def losses(said: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+)", said)}


def killed(ranks: Pool, folder: Path, where: str, step: int) -> dict[int, str]:
    """Run until one of the two processes ends by SIGKILL; returns the losses until then."""
    said = folder.parent / f"killed-in-{where}"
    with pytest.raises(RankError) as failed:
        ranks(2, here, folder, said, "--die-in", where, "--die-at", str(step), grace=60)
    assert failed.value.types[0] in (
        "PeerError",
        "RuntimeError",
    )  # of fxshard's collectives, or of the example's
    assert "exit code -9" in failed.value.errors[1]
    return losses(said.read_text())


def here(folder: Path, said: Path, *more: str) -> None:
    """Run the example on this rank of the pool; what the first one says goes to a file, which survives a failure."""
    main = runpy.run_path(str(EXAMPLE))["main"]
    mute = Path(os.devnull)
    with open(said if dist.get_rank() == 0 else mute, "w") as file, contextlib.redirect_stdout(file):
        main([*options(folder), *more])


@pytest.mark.shows("C1", "C4")
@pytest.mark.timeout(400)
def test_same_losses_as_an_uninterrupted_run(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, here, tmp_path / "straight", tmp_path / "said")
    straight = losses((tmp_path / "said").read_text())
    assert list(straight) == list(range(STEPS))

    folder = tmp_path / "killed"
    first = killed(ranks, folder, "save", 4)
    assert "step-2" in os.listdir(folder) and "step-4" not in os.listdir(folder)
    second = killed(ranks, folder, "step", 5)
    assert list(second) == [2, 3, 4]
    ranks(2, here, folder, tmp_path / "said")
    third = losses((tmp_path / "said").read_text())
    assert list(third)[-1] == STEPS - 1 and 0 not in third
    assert {**first, **second, **third} == straight
    assert sorted(os.listdir(folder)) == ["step-4", "step-6"]  # keep=2
