"""Weights of Megatron-LM's distributed checkpoints, whose tensors are put together here head by head."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fxshard
from fxshard._torch.errors import CheckpointError
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.checkpoint import load_megatron
from tests.pool import Pool

HEADS, GROUPS, WIDTH, LAYERS, PADDING = 6, 2, 4, 3, 28
CONFIG = LlamaConfig(vocab=100, dim=HEADS * WIDTH, layers=LAYERS, heads=HEADS, kv_heads=GROUPS, hidden=40)
QKV, FC1 = "decoder.layers.self_attention.linear_qkv", "decoder.layers.mlp.linear_fc1"
NAMES: dict[str, str | tuple[str, str]] = {
    "embed.weight": ("embedding.word_embeddings.weight", "vocabulary"),
    "layers.*.attention_norm.weight": f"{QKV}.layer_norm_weight",
    "layers.*.attention.q.weight": (f"{QKV}.weight", "query"),
    "layers.*.attention.k.weight": (f"{QKV}.weight", "key"),
    "layers.*.attention.v.weight": (f"{QKV}.weight", "value"),
    "layers.*.attention.o.weight": "decoder.layers.self_attention.linear_proj.weight",
    "layers.*.mlp_norm.weight": f"{FC1}.layer_norm_weight",
    "layers.*.mlp.gate.weight": (f"{FC1}.weight", "gate"),
    "layers.*.mlp.up.weight": (f"{FC1}.weight", "up"),
    "layers.*.mlp.down.weight": "decoder.layers.mlp.linear_fc2.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "head.weight": ("output_layer.weight", "vocabulary"),
}


def plain(seed: int) -> Llama:
    torch.manual_seed(seed)
    model = Llama(CONFIG)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def as_megatron_has_it(model: Llama, heads: int = HEADS, groups: int = GROUPS) -> dict[str, torch.Tensor]:
    """Head by head, layer by layer."""
    own = model.state_dict()
    dim = own["norm.weight"].numel()
    width = dim // heads
    rows: dict[str, list[torch.Tensor]] = {}
    for i in range(len(model.layers)):
        q, k, v = (own[f"layers.{i}.attention.{name}.weight"] for name in "qkv")
        fused = []
        for group in range(groups):
            for head in range(group * heads // groups, (group + 1) * heads // groups):
                fused.append(q[head * width : (head + 1) * width])
            fused.append(k[group * width : (group + 1) * width])
            fused.append(v[group * width : (group + 1) * width])
        mlp = [own[f"layers.{i}.mlp.{name}.weight"] for name in ("gate", "up")]
        for key, value in {
            f"{QKV}.weight": torch.cat(fused),
            f"{QKV}.layer_norm_weight": own[f"layers.{i}.attention_norm.weight"],
            "decoder.layers.self_attention.linear_proj.weight": own[f"layers.{i}.attention.o.weight"],
            f"{FC1}.weight": torch.cat(mlp),
            f"{FC1}.layer_norm_weight": own[f"layers.{i}.mlp_norm.weight"],
            "decoder.layers.mlp.linear_fc2.weight": own[f"layers.{i}.mlp.down.weight"],
        }.items():
            rows.setdefault(key, []).append(value)
    padding = torch.zeros(PADDING, dim)
    return {
        **{key: torch.stack(of_layers) for key, of_layers in rows.items()},
        "embedding.word_embeddings.weight": torch.cat([own["embed.weight"], padding]),
        "output_layer.weight": torch.cat([own["head.weight"], padding]),
        "decoder.final_layernorm.weight": own["norm.weight"],
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": own["norm.weight"] * 0,
    }


def save(folder: Path, contents: dict[str, Any]) -> None:
    dcp.save({**contents, "decoder.layers.self_attention._extra_state": [1, 2]}, checkpoint_id=folder, no_dist=True)


def test_one_process(tmp_path: Path) -> None:
    wanted = plain(1)
    save(tmp_path / "iter_0000012", as_megatron_has_it(wanted))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    model = fxshard.shard(plain(2))
    load_megatron(model, tmp_path, NAMES, heads=HEADS, query_groups=GROUPS)
    found = model.full_state_dict()
    assert [name for name, value in wanted.state_dict().items() if not torch.equal(found[name], value)] == []


def written_and_read(folder: Path) -> list[str]:
    """Tensors in pieces, as tensor-parallel ranks of Megatron write them, read by ranks that want other rows."""
    wanted = plain(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    contents: dict[str, Any] = {}
    for key, value in as_megatron_has_it(wanted).items():
        dim = {3: 2 if "proj" in key or "fc2" in key else 1, 2: 0}.get(value.ndim)
        contents[key] = value if dim is None else distribute_tensor(value, mesh, [Shard(dim)])
    dcp.save(contents, checkpoint_id=folder)
    wrong = []
    for zero, layout in ((3, "rows"), (3, "whole"), (1, "rows")):
        model = fxshard.shard(plain(2), zero=zero, layout=layout, precision=fxshard.Precision(param=torch.bfloat16))
        load_megatron(model, folder, NAMES, heads=HEADS, query_groups=GROUPS)
        found = model.full_state_dict()
        wrong += [f"{layout} {n}" for n, value in wanted.state_dict().items() if not torch.equal(found[n], value)]
    return wrong


def test_ranks_read_their_rows_of_pieces(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(3, written_and_read, tmp_path / "saved") == [[], [], []]


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    contents = as_megatron_has_it(plain(1))
    save(tmp_path / "a", contents)
    model = fxshard.shard(plain(2))
    before = model.full_state_dict()

    def refused(match: str, folder: str = "a", names: Any = NAMES, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=match):
            load_megatron(model, tmp_path / folder, names, **{"heads": HEADS, "query_groups": GROUPS, **options})

    refused(r"linear_qkv.weight of 40 rows is not made of heads=6, query_groups=6", query_groups=None)
    refused(
        "head.weight: the table of names has no entry", names={k: v for k, v in NAMES.items() if k != "head.weight"}
    )
    refused(
        "output_layer.weight of the checkpoint is in no entry", names={**NAMES, "head.weight": NAMES["embed.weight"]}
    )
    refused("no final_norm", names={**NAMES, "norm.weight": "final_norm"})
    refused("has shape", names={**NAMES, "layers.*.mlp.gate.weight": (f"{FC1}.weight", "")})
    refused("has no .metadata", folder="nowhere")
    (tmp_path / "a" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refused("is stored as 'zarr'")
    (tmp_path / "a" / "metadata.json").write_text("{")
    refused(r"metadata\.json is damaged")
    (tmp_path / "a" / "metadata.json").unlink()
    file = next((tmp_path / "a").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    at = content.find(contents["decoder.final_layernorm.weight"].numpy().tobytes())
    content[at] ^= 1
    file.write_bytes(content)
    refused("is damaged")
    after = model.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_metadata_of_megatrons_own_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron pickles a class of its own, which nothing has to be able to import."""
    module = "megatron.core.dist_checkpointing.strategies.torch"
    save(tmp_path, as_megatron_has_it(plain(1)))

    @dataclass
    class MCoreMetadata(Metadata):
        mcore_data: dict[str, Any] | None = None

    MCoreMetadata.__module__, MCoreMetadata.__qualname__ = module, "MCoreMetadata"
    with monkeypatch.context() as patch:
        for i in range(len(module.split("."))):
            patch.setitem(sys.modules, ".".join(module.split(".")[: i + 1]), ModuleType("m"))
        sys.modules[module].MCoreMetadata = MCoreMetadata  # type: ignore[attr-defined]
        own = pickle.loads((tmp_path / ".metadata").read_bytes())
        (tmp_path / ".metadata").write_bytes(pickle.dumps(MCoreMetadata(**vars(own), mcore_data={"key": {"a": 1}})))
    model = fxshard.shard(plain(2))
    load_megatron(model, tmp_path, NAMES, heads=HEADS, query_groups=GROUPS)
    assert torch.equal(model.full_state_dict()["head.weight"], plain(1).state_dict()["head.weight"])
