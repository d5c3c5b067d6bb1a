"""What does not fit, or is damaged, is refused on every rank, and nothing is changed."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from tests.checkpoint.zoo import ADAMW, MUON, same, train, zoo
from tests.pool import Pool

POLAR = fxshard.Muon(coefficients="polar_express", adamw=ADAMW)


class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        plain = zoo()
        for name, child in plain.named_children():
            if name != "odd":
                self.add_module(name, child)
        self.odd = nn.Linear(29, 20)
        self.row, self.scale, self.empty = plain.row, plain.scale, plain.empty


class Smaller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(29, 19)
        self.new = nn.Linear(2, 2)


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "shapes": (Wider, {"optimizer": MUON}, r"odd.weight has shape \(19, 29\) there and \(20, 29\) here"),
    "keys": (Smaller, {"optimizer": MUON}, r"new.weight is missing(.|\n)*emb.weight is not in the model"),
    "coefficients": (zoo, {"optimizer": POLAR}, "coefficients='quintic', this optimizer has coefficients='polar_"),
    "steps": (zoo, {"optimizer": fxshard.Muon(steps=7, adamw=ADAMW)}, "made with steps=5"),
    "optimizer": (zoo, {"optimizer": ADAMW}, r"param groups there and|other parameters there and here"),
    "no optimizer": (zoo, {}, "the checkpoint has an optimizer and the model has none: pass optimizer="),
    "precision": (
        lambda: zoo().to(torch.bfloat16),
        {"optimizer": MUON},
        "model.emb.weight is float32 there and bfloat16 here",
    ),
}


def refusals(path: Path) -> dict[str, tuple[str, list[str]]]:
    """What each case says on this rank, and what it changed nevertheless."""
    trained = fxshard.shard(zoo(), optimizer=MUON, zero=3, layout="rows")
    train(trained, range(1))
    fxshard.save(trained, path)
    found = {}
    for name, (make, options, _) in CASES.items():
        model = fxshard.shard(make(), **options)
        before = model.full_state_dict()
        state = copy.deepcopy(model._optimizer.state_dict()) if model._optimizer is not None else None
        said = "it was loaded"
        try:
            fxshard.load(model, path)
        except fxshard.CheckpointError as error:
            said = str(error)
        changed = same(model.full_state_dict(), before)
        if state is not None and str(model._optimizer.state_dict()["param_groups"]) != str(state["param_groups"]):
            changed.append("param_groups")
        found[name] = (said, changed)
    return found


@pytest.mark.shows("C5", "O11")
def test_refused_on_every_rank(ranks: Pool, tmp_path: Path) -> None:
    for found in ranks(2, refusals, tmp_path / "a"):
        for name, (_, _, pattern) in CASES.items():
            said, changed = found[name]
            assert re.search(pattern, said), f"{name}: {said}"
            assert "nothing was loaded" in said
            assert changed == [], name


def only_one_rank_sees_it(path: Path) -> tuple[str, list[str]]:
    model = fxshard.shard(zoo(), optimizer=ADAMW)
    fxshard.save(model, path)
    train(model, range(1))
    before = model.full_state_dict()
    optimizer = model.optimizer
    if dist.get_rank() == 1:
        optimizer.param_groups.pop()
    try:
        fxshard.load(model, path)
    except fxshard.CheckpointError as error:
        return str(error), same(model.full_state_dict(), before)
    return "it was loaded", []


def test_a_problem_of_one_rank_is_a_problem_of_all(ranks: Pool, tmp_path: Path) -> None:
    for said, changed in ranks(2, only_one_rank_sees_it, tmp_path / "a"):
        assert "param groups there and 1 here (rank 1)" in said
        assert changed == []


def test_muon_does_not_take_what_normuon_saved(tmp_path: Path) -> None:
    saved = fxshard.shard(zoo(), optimizer=fxshard.NorMuon(lr=2e-2))
    train(saved, range(1))
    fxshard.save(saved, tmp_path / "a")
    with pytest.raises(fxshard.CheckpointError, match=r"second_momentum_buffer is not in this optimizer"):
        fxshard.load(fxshard.shard(zoo(), optimizer=fxshard.Muon(lr=2e-2)), tmp_path / "a")


def test_another_class_of_torchs_optimizers(tmp_path: Path) -> None:
    saved = fxshard.shard(zoo())
    sgd = torch.optim.SGD(saved.parameters(), lr=1e-2, momentum=0.9)
    train(saved, range(1), sgd)
    fxshard.save(saved, tmp_path / "a", optimizer=sgd)
    other = fxshard.shard(zoo())
    with pytest.raises(fxshard.CheckpointError, match=r"the optimizer is SGD there and Adam here"):
        fxshard.load(other, tmp_path / "a", optimizer=torch.optim.Adam(other.parameters()))
    ours = fxshard.shard(zoo(), optimizer=fxshard.AdamW(lr=1e-2))
    train(ours, range(1))
    fxshard.save(ours, tmp_path / "b")
    trained = [parameter for parameter in other.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    fxshard.load(other, tmp_path / "b", optimizer=adamw)  # the same update
    assert same(train(other, range(1, 2), adamw), train(ours, range(1, 2))) == []


def test_not_while_weights_are_whole(tmp_path: Path) -> None:
    model = fxshard.shard(zoo(), optimizer=ADAMW)
    fxshard.save(model, tmp_path / "a")
    with model.unshard():
        with pytest.raises(fxshard.StateError, match=r"inside model\.unshard\(\)"):
            fxshard.save(model, tmp_path / "b")
        with pytest.raises(fxshard.StateError, match=r"inside model\.unshard\(\)"):
            fxshard.load(model, tmp_path / "a")


def refused(path: Path, match: str) -> None:
    model = fxshard.shard(zoo(1), optimizer=MUON)
    before = model.full_state_dict()
    with pytest.raises(fxshard.CheckpointError, match=match):
        fxshard.load(model, path)
    assert same(model.full_state_dict(), before) == []


@pytest.mark.shows("C5")
def test_damaged(damaged: Path) -> None:
    data, metadata = damaged / "__0_1.distcp", damaged / ".metadata"
    whole, described = data.read_bytes(), metadata.read_bytes()
    data.write_bytes(whole[:-1])
    refused(damaged, f"__0_1.distcp has {len(whole) - 1} bytes instead of {len(whole)}")
    data.unlink()
    refused(damaged, "__0_1.distcp is missing")
    data.write_bytes(whole)
    metadata.write_bytes(described[:-1] + b"x")
    refused(damaged, r"\.metadata is not what was written")
    metadata.write_bytes(described)
    fxshard.load(fxshard.shard(zoo(1), optimizer=MUON), damaged)
    (damaged / "fxshard.json").write_text("{")
    refused(damaged, r"fxshard.json cannot be read")
    (damaged / "fxshard.json").write_text('{"format": 99}')
    refused(damaged, "a format that this version does not read")
    (damaged / "fxshard.json").unlink()
    refused(damaged, "no complete checkpoint")


def test_changed_bytes_are_noticed_before_anything_is_overwritten(damaged: Path) -> None:
    weights = bytes(zoo().odd.weight.detach().view(-1).view(torch.uint8).tolist())
    data = next(file for file in damaged.glob("*.distcp") if weights in file.read_bytes())
    content = bytearray(data.read_bytes())
    content[content.index(weights) + 10] ^= 1
    data.write_bytes(content)
    refused(damaged, r"nothing was loaded:\n.*odd.weight is not what was written")


def test_weights_only(good: Path) -> None:
    model = fxshard.shard(zoo(1))
    fxshard.load(model, good, weights_only=True)
    assert same(model.full_state_dict(), zoo().state_dict()) == []
