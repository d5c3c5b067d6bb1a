"""Saving: complete or not there at all, beside training, and found again."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.checkpoint import check
from tests.checkpoint.zoo import ADAMW, MUON, plain_contents, same, train, zoo
from tests.pool import Pool
from tests.training import deliver


def model(seed: int = 0) -> fxshard.ShardedModule:
    return fxshard.shard(zoo(seed), optimizer=MUON)


def die_half_way(done: int, total: int) -> None:
    if 2 * done > total:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.shows("C4")
def test_killed_in_the_middle(tmp_path: Path) -> None:
    first = model()
    expected = train(first, range(1))
    fxshard.save(first, tmp_path / "step-1")
    child = os.fork()  # cheaper than a process that imports torch
    if child == 0:
        torch.set_num_threads(1)  # those of this process are not there
        train(first, range(1, 2))
        fxshard.save(first, tmp_path / "step-2", progress=die_half_way)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    complete, half, _ = sorted(tmp_path.iterdir())
    assert complete.name == "step-1" and re.fullmatch(r"step-2\.\w+\.partial", half.name)
    assert any(half.glob("*.distcp"))

    assert fxshard.latest(tmp_path) == tmp_path / "step-1"
    again = model(1)
    assert fxshard.load(again, tmp_path).path == tmp_path / "step-1"
    assert same(again.full_state_dict(), expected) == []
    for name in ("step-2", half.name):
        with pytest.raises(fxshard.CheckpointError, match=r"no checkpoint|not completed"):
            fxshard.load(again, tmp_path / name)
    fxshard.save(again, tmp_path / "step-3")  # any save removes what nobody writes to any more
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]
    assert fxshard.latest(tmp_path) == tmp_path / "step-3"


@pytest.mark.parametrize("name", ["step-1", "step-2"])
def test_two_programs_save_at_the_same_time(tmp_path: Path, name: str) -> None:
    """Neither touches what the other writes; of two that want the same name, the first gets it, whole."""
    slow, fast = model(), model(1)
    expected = slow.full_state_dict(), fast.full_state_dict()
    go_on = threading.Event()
    pending = fxshard.save(slow, tmp_path / "step-1", asynchronous=True, progress=lambda *_: go_on.wait(60) and None)
    fxshard.save(fast, tmp_path / name)  # looks for what was left behind, and leaves the other alone
    go_on.set()
    if name == "step-1":
        warnings.simplefilter("ignore")  # a thread says that it failed, too
        with pytest.raises(fxshard.CheckpointError, match="another program saved there at the same time"):
            fxshard.checkpoint.wait_for_save(slow)
    else:
        pending.wait()
        fxshard.load(fast, tmp_path / "step-1")
        assert same(fast.full_state_dict(), expected[0]) == []
    fxshard.load(slow, tmp_path / name)
    assert same(slow.full_state_dict(), expected[1]) == []
    assert sorted(os.listdir(tmp_path)) == sorted({"step-1", name})


def beside_training(folder: Path) -> list[str]:
    """Writing waits until training has gone on; then it must still write what was there when it was asked to."""
    sharded = fxshard.shard(zoo(), optimizer=MUON, zero=3, layout="rows")
    at_save = train(sharded, range(2))
    go_on = threading.Event()
    extra = {"step": 2}
    pending = fxshard.save(
        sharded, folder / "step-2", asynchronous=True, extra=extra, progress=lambda done, total: go_on.wait() and None
    )
    extra["step"] = 99
    said = [] if not pending.done() else ["it did not wait"]
    later = train(sharded, range(2, 4))
    go_on.set()
    fxshard.save(sharded, folder / "step-4", asynchronous=True)  # waits for the one before
    assert pending.done()
    other = fxshard.shard(zoo(1), optimizer=MUON, zero=1)
    if fxshard.load(other, folder / "step-2").extra != {"step": 2}:
        said.append("extra")
    said += same(other.full_state_dict(), at_save)
    fxshard.checkpoint.wait_for_save(sharded)
    fxshard.load(other, folder)
    return said + same(other.full_state_dict(), later)


def test_asynchronous(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2, beside_training, tmp_path) == [[], []]


def fails_on_the_second_rank(folder: Path) -> list[str]:
    def fail(done: int, total: int) -> None:
        if dist.get_rank() == 1:
            raise OSError("the disk is full")

    sharded = fxshard.shard(zoo(), optimizer=ADAMW)
    said = []
    warnings.simplefilter("ignore")  # a thread says that it failed, too
    for asynchronous in (False, True):
        try:
            fxshard.save(sharded, folder / "a", asynchronous=asynchronous, progress=fail).wait()
        except fxshard.CheckpointError as error:
            said.append(str(error))
    try:
        fxshard.save(sharded, folder / "b")  # the next one is told of the failure before, once
    except fxshard.CheckpointError as error:
        said.append(str(error))
    fxshard.save(sharded, folder / "b")
    return said


def test_an_error_of_one_rank_reaches_all(ranks: Pool, tmp_path: Path) -> None:
    for said in ranks(2, fails_on_the_second_rank, tmp_path):
        assert len(said) == 3
        assert all("the disk is full (rank 1)" in one for one in said)
    assert os.listdir(tmp_path) == ["b"]  # what failed takes no room


def test_what_a_resumed_run_needs(tmp_path: Path) -> None:
    """Random numbers, scheduler, position: all go on as if nothing had happened."""
    numpy = pytest.importorskip("numpy")
    sharded = model()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(sharded.optimizer, [1, 3], 0.5)
    train(sharded, range(2))
    scheduler.step()
    torch.randn(5), random.random(), numpy.random.rand(3)
    fxshard.save(sharded, tmp_path / "a", extra={"scheduler": scheduler.state_dict(), "position": [3, "shard-7"]})
    expected = torch.randn(4).tolist(), random.random(), numpy.random.rand()
    for _ in range(3):
        scheduler.step()
    rates = [group["lr"] for group in sharded.optimizer.param_groups]

    again = model(1)
    other = torch.optim.lr_scheduler.MultiStepLR(again.optimizer, [1, 3], 0.5)
    was = fxshard.load(again, tmp_path / "a")
    other.load_state_dict(was.extra["scheduler"])
    assert (torch.randn(4).tolist(), random.random(), numpy.random.rand()) == expected
    for _ in range(3):
        other.step()
    assert [group["lr"] for group in again.optimizer.param_groups] == rates
    assert was.extra["position"] == [3, "shard-7"] and was.notes == []
    assert fxshard.load(model(2), tmp_path / "a", weights_only=True).extra["position"] == [3, "shard-7"]
    assert was.manifest["ranks"] == 1 and was.manifest["optimizer"]["groups"][0]["coefficients"] == "quintic"


def test_keep_and_latest(tmp_path: Path) -> None:
    sharded = fxshard.shard(zoo())
    for step in (9, 10, 100):
        fxshard.save(sharded, tmp_path / f"step-{step}", keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-100"]
    assert fxshard.latest(tmp_path) == tmp_path / "step-100"
    (tmp_path / "step-100" / "__0_0.distcp").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match=r"step-100 is damaged: __0_0.distcp has 0 bytes instead of"):
        assert fxshard.latest(tmp_path) == tmp_path / "step-10"
    assert fxshard.latest(tmp_path / "nowhere") is None


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    sharded, seen = model(), list[tuple[int, int]]()
    fxshard.save(sharded, tmp_path / "a", progress=lambda *counts: seen.append(counts))
    assert seen[-1][0] == seen[-1][1] == sum(value.nbytes for value in plain_contents(tmp_path / "a").values())
    seen.clear()
    fxshard.load(sharded, tmp_path / "a", progress=lambda *counts: seen.append(counts))
    assert seen[-1][0] == seen[-1][1]


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    sharded = model()
    with pytest.raises(fxshard.CheckpointError, match="extra cannot be saved"):
        fxshard.save(sharded, tmp_path / "a", extra={"lock": threading.Lock()})
    with pytest.raises(fxshard.CheckpointError, match="extra cannot be saved"):
        fxshard.save(sharded, tmp_path / "a", extra={"path": tmp_path})  # could be pickled, but not read back safely
    with pytest.raises(fxshard.ConfigError, match="keep=0"):
        fxshard.save(sharded, tmp_path / "a", keep=0)
    with pytest.raises(fxshard.ConfigError, match=r"fxshard.compile or fxshard.shard made, got Zoo"):
        fxshard.save(zoo(), tmp_path / "a")  # type: ignore[arg-type]
    fxshard.save(sharded, tmp_path / "a")
    with pytest.raises(fxshard.CheckpointError, match="exists already"):
        fxshard.save(sharded, tmp_path / "a")
    assert json.loads((tmp_path / "a" / "fxshard.json").read_text()) == check(tmp_path / "a")


def adapters_alone(folder: str) -> tuple[bool, bool, list[str], list[str]]:
    """Save what trains; load it into a model with another base: whether what trains came, and the base stayed."""

    def made(seed: int) -> fxshard.ShardedModule:
        torch.manual_seed(seed)
        plain = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
        return fxshard.shard(plain, optimizer=fxshard.AdamW(lr=0.1))

    model, other = made(0), made(1)
    deliver(model, {"1.weight": torch.ones(8, 8), "1.bias": torch.ones(8)})
    model.optimizer.step()
    fxshard.save(model, Path(folder, "adapter"), frozen=False)
    before = other.full_state_dict()
    notes = fxshard.load(other, Path(folder, "adapter")).notes
    saved, after = model.full_state_dict(), other.full_state_dict()
    came = all(torch.equal(after[name], saved[name]) for name in after if name.startswith("1."))
    stayed = all(torch.equal(after[name], before[name]) for name in after if name.startswith("0."))
    trains = fxshard.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with pytest.raises(fxshard.CheckpointError) as refused:  # everything trains there
        fxshard.load(trains, Path(folder, "adapter"), weights_only=True)
    return came, stayed, notes, [str(refused.value)]


def test_a_checkpoint_of_what_trains_leaves_the_rest_as_it_is(ranks: Pool, tmp_path: Path) -> None:
    for came, stayed, notes, (refused,) in ranks(2, adapters_alone, str(tmp_path)):
        assert came and stayed
        assert notes == ["parameters that do not train are not in it, and stayed as they are"]
        assert "0.weight" in refused


class Counting(nn.Linear):
    """Keeps a number of its own in state dicts."""

    def __init__(self, seen: int) -> None:
        super().__init__(4, 4)
        self.seen = seen

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_extra_state_of_modules(tmp_path: Path) -> None:
    fxshard.save(fxshard.shard(nn.Sequential(Counting(7), Counting(8))), tmp_path / "a")
    plain = nn.Sequential(Counting(1), Counting(1))
    fxshard.load(fxshard.shard(plain), tmp_path / "a")
    assert [module.seen for module in plain if isinstance(module, Counting)] == [7, 8]


def test_extra_state_in_state_dicts() -> None:
    def plain(seen: int) -> nn.Module:
        return nn.Sequential(Counting(seen), nn.Sequential(Counting(seen + 1)))

    def seen(model: nn.Module) -> list[int]:
        return [module.seen for module in model.modules() if isinstance(module, Counting)]

    model = fxshard.shard(plain(7))
    assert list(model.state_dict()) == list(model.full_state_dict()) == list(plain(0).state_dict())
    back = plain(0)
    back.load_state_dict(model.full_state_dict())
    assert seen(back) == [7, 8]
    for given in (back.state_dict(), {f"module.{key}": value for key, value in back.state_dict().items()}):
        other = plain(0)
        fxshard.shard(other).load_state_dict(given)
        assert seen(other) == [7, 8]
    alone = Counting(0)
    fxshard.shard(alone).load_state_dict(Counting(7).state_dict())
    assert alone.seen == 7
