"""Weights that are several projections in one, found by name and shape: how Muon cuts them by default.

Orthogonalised as one matrix, a projection with large gradients drowns the others. Which rows belong to which is a
convention of the model: all queries, then keys, then values (``qkv_proj``); or query, key and value of each head, or
of each group of heads that share a key, in turn (``query_key_value``). Numbers of heads are attributes of the modules
around a weight, or of their ``config``. What remains unclear is left whole, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxshard.optim.config import Split

_ONE_AFTER_ANOTHER = ("qkv", "qkv_proj", "wqkv", "w_pack", "c_attn", "att_proj", "in_proj", "to_qkv")
_IN_TURN = ("query_key_value", "linear_qkv")
_GATED = {
    # gate and up in one → the projection back, whose columns are half of the rows
    "gate_up_proj": "down_proj",
    "gate_up": "down",
    "w13": "w2",
    "w12": "w3",
    "wi": "wo",
    "linear_fc1": "linear_fc2",
    "dense_h_to_4h": "dense_4h_to_h",
    "weights_in": "weights_out",
}
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads", "multi_query_group_num", "num_query_groups")
_WIDTH = ("head_dim", "kv_channels")


@dataclass(frozen=True)
class Found:
    """A weight that looks fused: how it is cut, or None if it is left whole, and what was found."""

    split: Split | None
    why: str


def find_fused(model: nn.Module | Iterable[tuple[str, torch.Tensor]]) -> dict[str, Found]:
    """Every parameter whose name says that it is several projections in one."""
    if isinstance(model, nn.Module):
        named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
        modules = dict(model.named_modules())
    else:
        named, modules = list(model), {}
    shapes = {name: tuple(parameter.shape) for name, parameter in named}
    found = {}
    for name, shape in shapes.items():
        if len(shape) in (2, 3):
            one = _look(name, shape, shapes, _around(name, modules))
            if one is not None:
                found[name] = one
    return found


def _around(name: str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """The modules that a parameter lies in, the innermost first."""
    parts = name.split(".")[:-1]
    paths = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [modules[path] for path in paths if path in modules]


def _look(
    name: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]], around: Sequence[nn.Module]
) -> Found | None:
    parts = name.split(".")
    own = parts[-1] if parts[-1] not in ("weight", "kernel") else parts[-2] if len(parts) > 1 else ""
    if any(own.lower() == wanted for wanted in _GATED):
        return _gated(name, own, shape, shapes)
    if own == "in_proj_weight" and around and isinstance(around[0], nn.MultiheadAttention):
        return Found(Split(3), "query, key and value, one after another")
    in_turn = own.lower() in _IN_TURN
    if len(shape) != 2 or not (in_turn or own.lower() in _ONE_AFTER_ANOTHER):
        return None
    kinds = {type(module).__name__ for module in around}
    if "Conv1D" in kinds:
        return Found(None, "its columns are query, key and value, and a split cuts rows")
    if any(kind.startswith("CodeGen") for kind in kinds):
        return Found(None, "query, value and key alternate by the model-parallel ranks of the original")
    in_turn |= any(kind.startswith("InternLM2") for kind in kinds) or _first(around, ("multi_query",)) is False
    in_turn &= _first(around, ("multi_query_group_num",)) is None  # ChatGLM
    found = _attention(shape, around, in_turn=in_turn)
    other_layers_have_it = own.lower() == "in_proj" and (found.split is None or _first(around, _HEADS) is None)
    return None if other_layers_have_it else found


def _attention(shape: tuple[int, ...], around: Sequence[nn.Module], *, in_turn: bool) -> Found:
    """Rows of queries, keys and values."""
    rows, columns = shape
    heads, keys, width = (_first(around, names) for names in (_HEADS, _KEYS, _WIDTH))
    if heads:
        for of_keys in dict.fromkeys((keys or heads, heads, 1)):
            head, rest = divmod(rows, heads + 2 * of_keys)
            if not rest and heads % of_keys == 0 and head == (width or columns // heads):
                return _cut(heads, of_keys, head, in_turn=in_turn)
        return Found(None, f"{rows} rows are not {heads} heads with keys and values")
    if in_turn:
        return Found(None, "query, key and value alternate, and nothing says how many heads there are")
    if rows == 3 * columns:
        return Found(Split(3), "query, key and value, one after another")
    of_keys, odd = divmod(rows - columns, 2)
    if not odd and 0 < of_keys < columns and columns % of_keys == 0:
        return Found(Split((columns, of_keys, of_keys)), "query, key and value, one after another")
    return Found(None, f"{rows} rows of {columns} are not query, key and value")


def _cut(heads: int, keys: int, width: int, *, in_turn: bool) -> Found:
    if not in_turn or keys == 1:
        parts = (heads * width, keys * width, keys * width)
        return Found(Split(3 if heads == keys else parts), "query, key and value, one after another")
    shared = heads // keys
    what = "head" if shared == 1 else f"group of {shared} heads"
    return Found(
        Split((shared * width, width, width), groups=keys), f"query, key and value of each {what}, {keys} in turn"
    )


def _gated(name: str, own: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> Found | None:
    """Halves of the rows, if the projection back says that rows are what is joined."""
    parts = name.split(".")
    back = [(_GATED[own.lower()] if part == own else part).lower() for part in parts]
    down = next((other for path, other in shapes.items() if path.lower() == ".".join(back)), None)
    if down is None or len(down) != len(shape):
        return Found(None, f"there is no {_GATED[own.lower()]} next to it that says how its rows are joined")
    *_, rows, columns = shape
    *_, outputs, inner = down
    by_rows, by_columns = (rows, columns) == (2 * inner, outputs), (columns, rows) == (2 * outputs, inner)
    if by_rows and not by_columns:
        return Found(Split(2), "gate and up, one after another")
    if by_columns and not by_rows:
        return Found(None, "its columns are gate and up, and a split cuts rows")
    return None  # not gated: as many rows as the projection back has columns


def _first(around: Sequence[nn.Module], names: Sequence[str]) -> Any:
    """The first of these attributes in the innermost module that has one, or in its config."""
    for module in around:
        for holder in (module, getattr(module, "config", None)):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, (int, bool)):
                    return value
    return None


def summary(found: dict[str, Found]) -> list[str]:
    """A line for each way in which weights are cut or left whole."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, one in found.items():
        alike.setdefault((str(one.split) if one.split is not None else "", one.why), []).append(name)
    lines = []
    for (split, why), names in alike.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        how = f"cut by {split} ({why})" if split else f"left whole: {why}"
        lines.append(f"Muon: {names[0]}{others} {how}")
    return lines
