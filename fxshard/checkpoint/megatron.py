"""Weights of a Megatron-LM distributed checkpoint (``--ckpt-format torch_dist``), through a table of names.

Such a folder is one of ``torch.distributed.checkpoint``. Layers lie on top of each other in one tensor, query, key and
value of each group of heads in turn, gate above up. Each rank reads its own rows, and no code of the folder's runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from fxshard._torch.errors import CheckpointError, ConfigError
from fxshard.checkpoint.hugging_face import fill_rows
from fxshard.checkpoint.reader import RowReader
from fxshard.checkpoint.records import Record
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
    where: dict[str, Any] = {}
    problems: list[str] = []
    try:
        reader = _open(_folder(Path(path)))
        plan = _Table(reader, names, heads, query_groups or heads)
        where = plan.slices({name: tuple(value.shape) for name, value in model.state_dict(keep_vars=True).items()})
        problems = plan.problems
    except (CheckpointError, ConfigError, OSError) as error:
        problems = [str(error)]
    ranks.settle(problems, f"{path} does not fit, nothing was loaded")
    damaged = reader.damage(tuple({each.key for each in where.values()}), ranks.rank, ranks.size)
    ranks.settle(damaged, f"{path} is damaged, nothing was loaded")
    fill_rows(model, where, ranks)


@dataclass(frozen=True)
class MegatronSlice:
    """Rows of a stored tensor that are one parameter, read when they are asked for."""

    reader: RowReader
    key: str
    layer: int | None
    """Which layer of a tensor that holds all of them."""
    runs: tuple[tuple[int, int], ...]
    """Stored rows, the first and the one after the last, in the order of the parameter's rows."""
    columns: tuple[int, ...]
    """What a row has."""

    def get_shape(self) -> list[int]:
        return [sum(end - begin for begin, end in self.runs), *self.columns]

    def get_dtype(self) -> str:
        return "F" if self._stored.properties.dtype.is_floating_point else "I"

    def __getitem__(self, part: Any, /) -> torch.Tensor:
        wanted = [range(size)[cut] for size, cut in zip(self.get_shape(), _slices(part, self.get_shape()), strict=True)]
        rows, at = [], 0
        for begin, end in self.runs:
            first = max(wanted[0].start - at, 0) + begin
            last = min(wanted[0].stop - at, end - begin) + begin
            if first < last:
                rows.append(self._box([(first, last), *((cut.start, cut.stop) for cut in wanted[1:])]))
            at += end - begin
        return (
            torch.cat(rows) if rows else torch.empty([len(cut) for cut in wanted], dtype=self._stored.properties.dtype)
        )

    @property
    def _stored(self) -> TensorStorageMetadata:
        stored = self.reader.read_metadata().state_dict_metadata[self.key]
        assert isinstance(stored, TensorStorageMetadata)
        return stored

    def _box(self, box: list[tuple[int, int]]) -> torch.Tensor:
        """Elements between bounds in every dimension, out of all pieces that have some of them."""
        whole = box if self.layer is None else [(self.layer, self.layer + 1), *box]
        dtype = self._stored.properties.dtype
        found = torch.empty([end - begin for begin, end in whole], dtype=dtype)
        for chunk in self._stored.chunks:
            bounds = list(zip(chunk.offsets, chunk.sizes, strict=True))
            common = [(max(b, o), min(e, o + n)) for (b, e), (o, n) in zip(whole, bounds, strict=True)]
            if any(begin >= end for begin, end in common):
                continue
            piece = self._rows(MetadataIndex(self.key, chunk.offsets), chunk.sizes, common[0], chunk.offsets[0])
            for dim, ((begin, end), (offset, _)) in enumerate(zip(common[1:], bounds[1:], strict=True), start=1):
                piece = piece.narrow(dim, begin - offset, end - begin)
            at = tuple(slice(b - start, e - start) for (b, e), (start, _) in zip(common, whole, strict=True))
            found[at] = piece
        return found if self.layer is None else found[0]

    def _rows(self, index: MetadataIndex, sizes: torch.Size, rows: tuple[int, int], offset: int) -> torch.Tensor:
        """Rows of one stored piece."""
        place, dtype = self.reader.read_metadata().storage_data[index], self._stored.properties.dtype
        into = torch.empty((rows[1] - rows[0], *sizes[1:]), dtype=dtype)
        with open(Path(self.reader.path) / place.relative_path, "rb", buffering=0) as file:
            record = Record(file, place.offset, place.length, self.key)
            record.read(into, (rows[0] - offset) * into[:1].nbytes if len(into) else 0)
        return into


class _Table:
    """The table of names applied to a model and a checkpoint."""

    def __init__(self, reader: RowReader, names: Names, heads: int | None, groups: int | None) -> None:
        self._reader, self._names, self._heads, self._groups = reader, names, heads, groups
        metadata = reader.read_metadata().state_dict_metadata
        self._stored = {key: tuple(v.size) for key, v in metadata.items() if isinstance(v, TensorStorageMetadata)}
        self.problems: list[str] = []

    def slices(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, MegatronSlice]:
        """Where each of the model's tensors comes from."""
        found, used = {}, set()
        for name, shape in wanted.items():
            entry = next((e for pattern, e in self._names.items() if fnmatchcase(name, pattern)), None)
            if entry is None:
                self.problems.append(f"{name}: the table of names has no entry for it")
                continue
            key, part = entry if isinstance(entry, tuple) else (entry, "")
            pattern = next(pattern for pattern in self._names if fnmatchcase(name, pattern))
            layer = _number(name, pattern)
            in_key = "*" in key
            key = key.replace("*", str(layer)) if in_key else key
            if key not in self._stored:
                self.problems.append(f"{name}: the checkpoint has no {key}")
                continue
            used.add(key)
            try:
                found[name] = self._slice(key, part, None if in_key else layer, shape)
            except ConfigError as error:
                self.problems.append(f"{name}: {error}")
        left = [key for key in self._stored if key not in used and not key.startswith(_OTHERS) and "_extra" not in key]
        self.problems += [f"{key} of the checkpoint is in no entry of the table" for key in sorted(left)[:8]]
        return found

    def _slice(self, key: str, part: str, layer: int | None, shape: tuple[int, ...]) -> MegatronSlice:
        stored = self._stored[key]
        if layer is not None and len(stored) == len(shape) + 1:
            if layer >= stored[0]:
                raise ConfigError(f"{key} has {stored[0]} layers")
            stored = stored[1:]
        else:
            layer = None
        if not stored or part not in ("", *PARTS):
            raise ConfigError(f"{part!r} of {key}: expected one of {', '.join(PARTS)}, of a tensor with rows")
        return MegatronSlice(self._reader, key, layer, self._runs(part, stored[0], key, shape), stored[1:])

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


def _number(name: str, pattern: str) -> int | None:
    """What stands for ``*``."""
    if "*" not in pattern:
        return None
    before, _, after = pattern.partition("*")
    found = name[len(before) : len(name) - len(after) if after else None]
    if not found.isdecimal():
        raise ConfigError(
            f"the pattern {pattern!r} of the table finds {found!r} in {name}, where a layer's number belongs"
        )
    return int(found)


def _slices(part: Any, shape: list[int]) -> tuple[slice, ...]:
    return tuple(slice(None) for _ in shape) if part is ... else part


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
        backend = json.loads(config.read_text()).get("sharded_backend")
        if backend != "torch_dist":
            raise CheckpointError(f"{path} is stored as {backend!r}: convert it to torch_dist with Megatron first")
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"{path} is no distributed checkpoint: it has no .metadata")
    return RowReader(path, {file.name: file.stat().st_size for file in path.glob("*.distcp")})
