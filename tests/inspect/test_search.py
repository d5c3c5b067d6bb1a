"""``fxshard search`` and ``inspect --tp``: in other processes, where torch's fake process group may be made."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch.distributed as dist

from fxshard.bench.search import Choice, Search
from fxshard.cli import main as cli
from fxshard.planner.hardware import hardware
from fxshard.schedule.files import from_json
from tests.pool import Pool

FACTORY = """
import torch
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.bench.tensor_parallel import cut as parallelize

def build():
    with torch.device("meta"):
        model = Llama(LlamaConfig(vocab=512, dim=256, layers=1, heads=8, hidden=512))
        return model, (torch.empty(1, 128, dtype=torch.long), torch.empty(1, 128, dtype=torch.long))
"""


@pytest.mark.thorough
@pytest.mark.shows("T7")
def test_every_mesh_and_stage_the_fastest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # one process, which loads torch once
    (tmp_path / "mine.py").write_text(FACTORY)
    target = f"{tmp_path}/mine.py:build"
    assert cli.main(["search", target, "--world-size", "16", "--tp", "1,2", "--zero", "3"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["mesh", "shards", "ZeRO", "step", "ms", "tokens/s", "per", "GPU", "exposed", "GiB"]
    assert len(lines) == 2  # one node of eight holds no second replica of eight
    assert {line[: line.index("  ")] for line in lines} == {"dp 16", "dp 8 × tp 2"}
    steps = [int(line.split()[-4]) for line in lines]
    assert steps == sorted(steps)


def inspected(factory: str) -> str:
    """On a rank that leaves its group, because this makes torch's fake one."""
    dist.destroy_process_group()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(["inspect", factory, "--world-size", "64", "--tp", "4", "--shard-size", "4", "--json"]) == 0
    return out.getvalue()


@pytest.mark.thorough
@pytest.mark.shows("T7")
def test_inspect_with_tensor_parallel_ranks(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    schedule = from_json(ranks(1, inspected, f"{tmp_path}/mine.py:build")[0])
    domain = schedule.buckets[0].domain
    assert (domain.shards, domain.replicas, domain.stride) == (4, 4, 4)
    assert [group.name for group in schedule.model_groups] == ["tp×4"]
    schedule.verify()


def test_which_choices_there_are() -> None:
    search = Search("llama-70b", 1024, hardware("h200"), stages=(0, 3))
    assert list(search.choices(8)) == [Choice(8, 128, 1, 3), Choice(8, 16, 8, 3), Choice(8, 128, 1, 0)]
    assert Choice(8, 16, 8, 3).mesh == "dp 128 × tp 8"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["search", "llama-8b", "--world-size", "8", "--tp", "3"], "must divide --world-size 8"),
        (["search", "llama-8b", "--world-size", "8", "--tp", "a"], "expected numbers"),
        (["search", "llama-8b", "--world-size", "8", "--zero", "4"], "stages 0 to 3"),
        (["search", "moe-16b", "--world-size", "8", "--layers", "1"], "has no tensor-parallel plan"),
        (["inspect", "llama-8b", "--world-size", "8", "--tp", "3", "--layers", "1"], "is no multiple of it"),
    ],
)
def test_what_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_sizes_that_divide_the_ranks_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, ...]] = []

    def run(self: Search, tensor: tuple[int, ...], *_: object) -> list[object]:
        tried.append(tensor)
        return []

    monkeypatch.setattr(Search, "run", run)
    for ranks in ("6", "7"):
        assert cli.main(["search", "llama-8b", "--world-size", ranks, "--layers", "1"]) == 0
    assert tried == [(1, 2), (1,)]
