"""Weights of ``transformers`` models into a sharded model and out of one: the same bits, and never all on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard.checkpoint import load_safetensors
from tests.checkpoint.zoo import same
from tests.hugging_face import SMALL, llama
from tests.measuring import NewBytes
from tests.pool import Pool

hf = pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")
pytest.importorskip("safetensors")

TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
KINDS = ["llama", "tied", "gpt2", "mixtral"]


def make(kind: str, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL | TOKENS | experts | {"num_hidden_layers": layers}))
    if kind == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 32}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **TOKENS))
    return llama(num_hidden_layers=layers, tie_word_embeddings=kind == "tied", dtype=torch.float32, **TOKENS)


def on_meta(kind: str, layers: int = 2) -> nn.Module:
    with torch.device("meta"):
        return make(kind, layers)


def saved_and_loaded(folder: Path) -> list[str]:
    """What differs from the plain model after saving, and after loading what plain ``transformers`` saved."""
    wrong = []
    for kind in KINDS:
        model = fxshard.shard(make(kind))
        model.save_pretrained(folder / kind, max_shard_size="10KB")
        model.save_pretrained(folder / kind, max_shard_size="20KB")  # takes the place of the first, files included
        meta = on_meta(kind)
        loaded = fxshard.shard(meta, init=meta._init_weights)
        load_safetensors(loaded, folder / f"plain-{kind}")
        wrong += [f"{kind}: {name}" for name in same(loaded.full_state_dict(), make(kind).state_dict())]
    return wrong


@pytest.mark.shows("H6", "H7")
def test_files_are_those_of_transformers(ranks: Pool, tmp_path: Path) -> None:
    for kind in KINDS:
        make(kind).save_pretrained(tmp_path / f"plain-{kind}")
    assert ranks(2, saved_and_loaded, tmp_path) == [[], []]
    for kind in KINDS:
        ours, theirs = tmp_path / kind, tmp_path / f"plain-{kind}"
        assert same(type(make(kind)).from_pretrained(ours).state_dict(), make(kind).state_dict()) == []
        for name in ("config.json", "generation_config.json"):
            assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())
        index = json.loads((ours / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == stored(theirs).keys()
        assert set(index.values()) == {file.name for file in ours.glob("*.safetensors")}
        assert not (tmp_path / f"{kind}.partial").exists()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


class AtCopies(TorchDispatchMode):
    """The most that is alive when a matrix is copied; counting takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.new, self.most = NewBytes(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].numel() > 500:
            self.most = max(self.most, self.new.count())
        return func(*args, **(kwargs or {}))


def peak(folder: Path, kind: str) -> tuple[int, int, int]:
    """Bytes of the largest unit, of this rank's shards, and the most that was alive while weights were loaded."""
    watching = AtCopies()
    meta = on_meta(kind, 4)
    model = fxshard.shard(meta, init=meta._init_weights)
    with watching:
        load_safetensors(model, folder)
    buckets = model._sharding.buckets
    assert same(model.full_state_dict(), make(kind, 4).state_dict()) == []
    return max(b.plan.layout.numel * 4 for b in buckets), sum(b.master.nbytes for b in buckets), watching.most


@pytest.mark.shows("H6")
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_loading_holds_the_shard_and_at_most_a_unit(ranks: Pool, tmp_path: Path, kind: str) -> None:
    make(kind, 4).save_pretrained(tmp_path / "plain")
    for unit, shard, most in ranks(2, peak, tmp_path / "plain", kind):
        assert shard > 1.5 * unit
        assert shard < most < shard + 1.2 * unit


def refused(folder: Path) -> list[str]:
    model = fxshard.shard(make("llama"))
    said = []
    whole = model.full_state_dict()
    of_one = whole if dist.get_rank() else None
    for path, options in (
        (folder, {"variant": "fp16"}),
        (folder / "file", {}),
        (folder, {"max_shard_size": "big"}),
        (folder, {"state_dict": model.state_dict()}),
        (folder, {"state_dict": of_one}),
    ):
        try:
            model.save_pretrained(path, **options)
        except fxshard.FxshardError as error:
            said.append(str(error))
    dist.barrier()
    return said


def test_what_cannot_be_saved_is_said_on_every_rank(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for said in ranks(2, refused, tmp_path):
        assert "save_pretrained(variant=...): a sharded model writes its own weights" in said[0]
        assert "was not saved: FileExistsError" in said[1]
        assert "max_shard_size='big'" in said[2]
        assert "these tensors are sharded" in said[3] and "full_state_dict()" in said[3]
        assert "not on the first rank" in said[4]


class Published(nn.Linear):
    """Writes its files as another library than ``transformers`` does."""

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), folder)


def test_save_pretrained_of_other_libraries_is_refused(tmp_path: Path) -> None:
    model = fxshard.compile(Published(8, 8), lowering="eager")
    with pytest.raises(fxshard.ConfigError, match=r"of Published is not that of transformers.*save_safetensors"):
        model.save_pretrained(tmp_path / "out")
