"""Weights as safetensors files, in and out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fxshard
from fxshard.checkpoint import load_safetensors, save_safetensors
from tests.checkpoint.test_experts import OneByOne, Together, grouped
from tests.checkpoint.zoo import same, zoo
from tests.pool import Pool

safetensors = pytest.importorskip("safetensors.torch")


def out_and_in(path: Path) -> list[str]:
    model = fxshard.shard(zoo(), layout="rows")
    save_safetensors(model, path / "many", file_bytes=3000)
    save_safetensors(model, path / "bf16", dtype=torch.bfloat16, rename=lambda name: f"model.{name}")
    other = fxshard.shard(zoo(1), layout="whole")
    load_safetensors(other, path / "many")
    wrong = same(other.full_state_dict(), zoo().state_dict())
    load_safetensors(other, path / "bf16", rename=lambda name: name.removeprefix("model."))
    rounded = {
        k: v.to(torch.bfloat16).to(v.dtype) if v.is_floating_point() else v for k, v in zoo().state_dict().items()
    }
    return wrong + same(other.full_state_dict(), rounded)


def test_out_and_in(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2, out_and_in, tmp_path) == [[], []]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == zoo().state_dict().keys() and len(set(index.values())) > 2
    by_hand = {}
    for file in (tmp_path / "many").glob("*.safetensors"):
        by_hand.update(safetensors.load_file(file))
    assert same(by_hand, dict(zoo().state_dict())) == []
    assert safetensors.load_file(tmp_path / "bf16" / "model.safetensors")["model.odd.weight"].dtype == torch.bfloat16


def loaded(path: Path, rename_away: bool) -> str:
    torch.manual_seed(dist.get_rank() + 5)
    model = fxshard.shard(zoo(1))
    before = model.full_state_dict()
    try:
        load_safetensors(model, path, rename=(lambda name: None if name == "row" else name) if rename_away else None)
    except fxshard.CheckpointError as error:
        assert same(model.full_state_dict(), before) == []
        return str(error)
    return "; ".join(same(model.full_state_dict(), zoo().state_dict()))


def test_tied_names_and_what_does_not_fit(ranks: Pool, tmp_path: Path) -> None:
    state = {name: value for name, value in zoo().state_dict().items() if name != "head.weight"}  # as transformers does
    safetensors.save_file(state, tmp_path / "model.safetensors")
    assert ranks(2, loaded, tmp_path, False) == ["", ""]
    for said in ranks(2, loaded, tmp_path, True):
        assert "nothing was loaded:\n  row is missing" in said
    safetensors.save_file(
        {**state, "row": torch.zeros(2, 40), "odd.bias": torch.zeros(19).long()}, tmp_path / "b.safetensors"
    )
    with pytest.raises(fxshard.CheckpointError, match=r"row has shape \(2, 40\) there and \(1, 40\) here"):
        load_safetensors(fxshard.shard(zoo()), tmp_path / "b.safetensors")
    with pytest.raises(fxshard.CheckpointError, match=r"odd.bias is I64 there and torch.float32 here"):
        load_safetensors(fxshard.shard(zoo()), tmp_path / "b.safetensors")
    with pytest.raises(fxshard.CheckpointError, match=r"emb.weight is there twice"):
        load_safetensors(fxshard.shard(zoo()), [tmp_path / "b.safetensors", tmp_path / "model.safetensors"])
    (tmp_path / "b.safetensors").write_bytes(b"nonsense")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ')
    for path, match in (("b.safetensors", "damaged"), ("c.safetensors", "missing"), (".", r"index\.json is damaged")):
        with pytest.raises(fxshard.CheckpointError, match=match):
            load_safetensors(fxshard.shard(zoo()), tmp_path / path)


@pytest.mark.shows("C3")
def test_experts_in_another_layout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = OneByOne()
    safetensors.save_file(plain.state_dict(), tmp_path / "a.safetensors")
    model = fxshard.shard(Together())
    notes = load_safetensors(model, tmp_path / "a.safetensors")
    assert "layers.1.experts.gain" in notes[0]
    assert same(model.full_state_dict(), grouped(dict(plain.state_dict()))) == []
