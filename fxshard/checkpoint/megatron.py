"""Weights of a Megatron-LM distributed checkpoint (``--ckpt-format torch_dist``), through a table of names.

Such a folder is one of ``torch.distributed.checkpoint``. Layers lie on top of each other in one tensor, query, key and
value of each group of heads in turn, gate above up. Each rank reads its own rows, and no code of the folder's runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from fxshard._torch.errors import CheckpointError, ConfigError
from fxshard.checkpoint.held import Held, of_model
from fxshard.checkpoint.loading import read_rows
from fxshard.checkpoint.planners import LoadRows, Target
from fxshard.checkpoint.reader import RowReader
from fxshard.checkpoint.saving import check_model, wait_for_save
from fxshard.frontend.module import ShardedModule

Names = Mapping[str, str | tuple[str, str]]
"""Pattern of the model's names → key in the checkpoint, or (key, which part of that tensor)."""
PARTS = ("query", "key", "value", "gate", "up", "vocabulary")
TRANSFORMERS_LLAMA: Names = {
    "model.embed_tokens.weight": ("embedding.word_embeddings.weight", "vocabulary"),
    "model.layers.*.input_layernorm.weight": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "model.layers.*.self_attn.q_proj.weight": ("decoder.layers.self_attention.linear_qkv.weight", "query"),
    "model.layers.*.self_attn.k_proj.weight": ("decoder.layers.self_attention.linear_qkv.weight", "key"),
    "model.layers.*.self_attn.v_proj.weight": ("decoder.layers.self_attention.linear_qkv.weight", "value"),
    "model.layers.*.self_attn.o_proj.weight": "decoder.layers.self_attention.linear_proj.weight",
    "model.layers.*.post_attention_layernorm.weight": "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    "model.layers.*.mlp.gate_proj.weight": ("decoder.layers.mlp.linear_fc1.weight", "gate"),
    "model.layers.*.mlp.up_proj.weight": ("decoder.layers.mlp.linear_fc1.weight", "up"),
    "model.layers.*.mlp.down_proj.weight": "decoder.layers.mlp.linear_fc2.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": ("output_layer.weight", "vocabulary"),
}
"""For a Llama of ``transformers`` and Megatron's GPT model with Transformer Engine's layers."""
_LATEST, _OTHERS = "latest_checkpointed_iteration.txt", ("optimizer.", "chained_", "rng_state", "rerun_state")


def load_megatron(
    model: ShardedModule,
    path: str | os.PathLike[str],
    names: Names = TRANSFORMERS_LLAMA,
    *,
    heads: int | None = None,
    query_groups: int | None = None,
) -> None:
    """Load the model's weights from a Megatron-LM distributed checkpoint, each rank reading its own rows. Collective.

    ``path``: a folder such as ``iter_0000100``, or one of those, of which the latest is taken. ``names``: patterns of
    the model's names, and the key each is stored under, with a part if it is a part of that tensor: "query", "key" or
    "value" of a fused projection (``heads`` and ``query_groups`` say how it is cut), "gate" or "up", or "vocabulary",
    whose rows Megatron pads. A ``*`` is a layer: what stands for it is put in place of ``*`` in the key, or is the
    first index of a tensor that holds all layers. Values are converted to the dtype that the model keeps. Everything is
    checked first, that nothing of the stored model is left over included.

    >>> fxshard.checkpoint.load_megatron(model, "runs/gpt", heads=32, query_groups=8)
    """
    ranks = check_model(model)
    wait_for_save(model)
    ranks.doing = f"loading {path}"
    try:
        folder = _folder(Path(path))
        reader = _open(folder)
        plan = _Table(reader.read_metadata(), names, heads, query_groups or heads)
        targets = plan.targets(list(of_model(model, ranks.parts, loading=True)))
        problems = plan.problems
    except (CheckpointError, ConfigError, OSError) as error:
        problems = [str(error)]
    ranks.settle(problems, f"{path} does not fit, nothing was loaded")
    damaged = reader.damage(tuple(plan.used), ranks.rank, ranks.size)
    ranks.settle(damaged, f"{path} is damaged, nothing was loaded")
    read_rows(reader, LoadRows(targets, ()), ranks, folder)
    model.parameters_changed()


class _Table:
    """The table of names applied to a model and a checkpoint."""

    def __init__(self, metadata: Metadata, names: Names, heads: int | None, groups: int | None) -> None:
        self._names, self._heads, self._groups = names, heads, groups
        self._stored = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self.problems: list[str] = []
        self.used: set[str] = set()

    def targets(self, held: Sequence[Held]) -> list[Target]:
        """The reads into the rows that this rank holds."""
        found: list[Target] = []
        for one in held:
            for name in one.names:
                try:
                    targets = self._of(name, one)
                except ConfigError as error:
                    self.problems.append(f"{name}: {error}")
                    continue
                found += targets if name == one.names[0] else []
        left = sorted(key for key in self._stored if key not in self.used and not key.startswith(_OTHERS))
        unknown = [key for key in left if "_extra" not in key]
        self.problems += [f"{key} of the checkpoint is in no entry of the table" for key in unknown[:8]]
        return found

    def _of(self, name: str, one: Held) -> list[Target]:
        pattern = next((pattern for pattern in self._names if fnmatchcase(name, pattern)), None)
        if pattern is None:
            raise ConfigError("the table of names has no entry for it")
        entry, layer = self._names[pattern], _number(name, pattern)
        key, part = entry if isinstance(entry, tuple) else (entry, "")
        if "*" in key:
            key, layer = key.replace("*", str(layer)), None
        if key not in self._stored:
            raise ConfigError(f"the checkpoint has no {key}")
        self.used.add(key)
        stored, dtype = tuple(self._stored[key].size), self._stored[key].properties.dtype
        if layer is not None and len(stored) == len(one.shape) + 1:
            if layer >= stored[0]:
                raise ConfigError(f"{key} has {stored[0]} layers")
            stored = stored[1:]
        else:
            layer = None
        if not stored or part not in ("", *PARTS):
            raise ConfigError(f"{part!r} of {key}: expected one of {', '.join(PARTS)}, of a tensor with rows")
        runs = self._runs(part, stored[0], key, one.shape)
        shape = (sum(end - begin for begin, end in runs), *stored[1:])
        if shape != one.shape:
            raise ConfigError(f"it has shape {shape} there and {one.shape} here")
        if dtype.is_floating_point != one.tensor.is_floating_point():
            raise ConfigError(f"it is {dtype} there and {one.tensor.dtype} here")
        return list(_rows(one, key, layer, runs))

    def _runs(self, part: str, rows: int, key: str, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The stored rows of a part."""
        if part == "vocabulary":
            if rows < shape[0]:
                raise ConfigError(f"{key} has {rows} rows, the model {shape[0]}")
            return ((0, shape[0]),)
        if part in ("gate", "up"):
            if rows % 2:
                raise ConfigError(f"{key} has {rows} rows, which are not gate and up")
            return ((0, rows // 2),) if part == "gate" else ((rows // 2, rows),)
        if not part:
            return ((0, rows),)
        heads, groups = self._heads, self._groups
        if not heads or not groups or heads % groups or rows % (heads + 2 * groups):
            raise ConfigError(f"{key} of {rows} rows is not made of heads={heads}, query_groups={groups}: say which")
        width, each = rows // (heads + 2 * groups), heads // groups
        begin, count = {"query": (0, each), "key": (each, 1), "value": (each + 1, 1)}[part]
        starts = [group * (each + 2) + begin for group in range(groups)]
        return tuple((start * width, (start + count) * width) for start in starts)


def _rows(one: Held, key: str, layer: int | None, runs: Sequence[tuple[int, int]]) -> Iterator[Target]:
    """The reads of a rank's rows from runs of stored rows, which one after another are a parameter.

    ``layer``: which one of a tensor that holds all of them.
    """
    first, at = one.offsets[0], 0
    for begin, end in runs:
        low, high = max(first, at), min(first + one.tensor.shape[0], at + end - begin)
        if low < high:
            place, rows = (begin + low - at, *one.offsets[1:]), one.tensor[low - first : high - first]
            yield Target(key, place, rows) if layer is None else Target(key, (layer, *place), rows.unsqueeze(0))
        at += end - begin


def _number(name: str, pattern: str) -> int | None:
    """The number in the place of ``*``."""
    if "*" not in pattern:
        return None
    before, _, after = pattern.partition("*")
    found = name[len(before) : len(name) - len(after) if after else None]
    if not found.isdecimal():
        raise ConfigError(
            f"the pattern {pattern!r} of the table finds {found!r} in {name}, where a layer's number belongs"
        )
    return int(found)


def _folder(path: Path) -> Path:
    """The checkpoint itself, or the latest of those in a folder."""
    if not (path / _LATEST).is_file():
        return path
    latest = (path / _LATEST).read_text().strip()
    if latest != "release" and not latest.isdecimal():
        raise CheckpointError(f"{path / _LATEST} names no iteration: {latest[:40]!r}")
    return path / (latest if latest == "release" else f"iter_{int(latest):07d}")


def _open(path: Path) -> RowReader:
    config = path / "metadata.json"
    if config.is_file():
        try:
            backend = json.loads(config.read_text()).get("sharded_backend")
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{config} is damaged: {error!r}") from error
        if backend != "torch_dist":
            raise CheckpointError(f"{path} is stored as {backend!r}: convert it to torch_dist with Megatron first")
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"{path} is no distributed checkpoint: it has no .metadata")
    return RowReader(path, {file.name: file.stat().st_size for file in path.glob("*.distcp")})
