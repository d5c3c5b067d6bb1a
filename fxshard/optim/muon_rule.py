"""The rule of Muon, apart from Newton–Schulz: which parameters, which matrices in them, momentum, scale and update.

Nothing here knows about ranks. Momentum and update are elementwise, so flat shards do as well as whole matrices. What
writes takes ``refused``, a number on the device of the tensors: unless it is zero, everything stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.optim import elementwise
from fxshard.optim.config import Muon, Scale, Split
from fxshard.optim.fused_weights import Found, find_fused

# Parts of a parameter's name that say what it is, where no module can be asked.
_EMBEDDINGS = ("embed", "wte", "wpe")
_HEADS = ("lm_head", "head", "output", "output_layer", "classifier", "score", "unembed")


def default_use(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix of a hidden layer, by name and shape alone.

    Two dimensions, or three where the first counts experts; no embedding, head, norm or bias.
    """
    if len(shape) not in (2, 3) or min(shape[-2:], default=0) < 2:
        return False
    *modules, leaf = name.lower().split(".")
    owner = modules[-1] if modules else leaf
    if "bias" in leaf or owner in _HEADS:
        return False
    return not any(word in part for part in (*modules, leaf) for word in (*_EMBEDDINGS, "norm"))


def matrices(choice: Muon, model: nn.Module | Iterable[tuple[str, torch.Tensor]]) -> dict[str, Split | None]:
    """The parameters that are Muon's, in the order of the model, each with its split. All others are AdamW's.

    Given a module, embeddings, heads and convolutions are recognised by type as well. A tied weight counts once, under
    its first name, and as an embedding if any of its owners is one. Raises ``ConfigError`` for what cannot work.
    """
    if isinstance(model, nn.Module):
        named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
        apart = _not_hidden(model)
    else:
        named, apart = list(model), set()
    chosen: dict[str, Split | None] = {}
    fused = found_fused(choice, model if isinstance(model, nn.Module) else named)
    for name, parameter in named:
        shape = tuple(parameter.shape)
        if not parameter.requires_grad:
            continue
        if choice.use is None:
            if id(parameter) in apart or not default_use(name, shape):
                continue
        elif not choice.use(name, shape):
            continue
        if len(shape) not in (2, 3):
            raise ConfigError(
                f"Muon: use() selects {name!r} of shape {list(shape)}, which is no matrix; Muon takes [out, in] and "
                "[experts, out, in], everything else belongs to adamw"
            )
        chosen[name] = _given_split(choice, name, shape)
        if chosen[name] is None and name in fused:
            chosen[name] = fused[name].split
    for pattern in _patterns(choice):
        if not any(fnmatchcase(name, pattern) for name in chosen):
            raise ConfigError(f"Muon: split pattern {pattern!r} matches none of Muon's parameters: {_some(chosen)}")
    return chosen


def _some(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "") or "it has none"


def _not_hidden(model: nn.Module) -> set[int]:
    """Parameters of embeddings and convolutions, and the last linear layer if it is shaped like an embedding."""
    modules = list(model.modules())
    tables = [module for module in modules if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    apart = {id(table.weight) for table in tables}
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    apart |= {id(p) for module in modules if isinstance(module, convolutions) for p in module.parameters()}
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    if linears and any(linears[-1].weight.shape == table.weight.shape for table in tables):
        apart.add(id(linears[-1].weight))
    return apart


def found_fused(choice: Muon, model: nn.Module | Iterable[tuple[str, torch.Tensor]]) -> dict[str, Found]:
    """The weights that look fused and that no pattern of ``split`` speaks of; none if it is "off"."""
    if choice.split == "off":
        return {}
    given = _patterns(choice)
    return {
        name: found
        for name, found in find_fused(model).items()
        if not any(fnmatchcase(name, pattern) for pattern in given)
    }


def _patterns(choice: Muon) -> Mapping[str, Any]:
    return choice.split if isinstance(choice.split, Mapping) else {}


def _given_split(choice: Muon, name: str, shape: tuple[int, ...]) -> Split | None:
    for pattern, split in _patterns(choice).items():
        if fnmatchcase(name, pattern):
            assert isinstance(split, Split)  # Muon's constructor wraps the short forms
            check_split(name, shape, split)
            return split
    return None


def check_split(name: str, shape: Sequence[int], split: Split) -> None:
    """Raise ``ConfigError`` unless ``split`` cuts a parameter of this shape without remainder."""
    rows = shape[-2]
    where = f"Muon: {name!r} of shape {list(shape)} cannot be cut by {split}"
    if rows % split.groups:
        raise ConfigError(f"{where}: {rows} rows are not {split.groups} equal groups")
    of_group = rows // split.groups
    within = f"{of_group} rows" + (f" of each of {split.groups} groups" if split.groups > 1 else "")
    if isinstance(split.parts, int):
        if of_group % split.parts:
            raise ConfigError(f"{where}: {within} are not {split.parts} equal parts")
    elif sum(split.parts) != of_group:
        raise ConfigError(f"{where}: the parts have {sum(split.parts)} rows together, not the {within}")
    parts = part_rows(rows, split)
    if isinstance(split.head_rows, tuple) and len(split.head_rows) != len(parts):
        raise ConfigError(f"{where}: {len(split.head_rows)} numbers of head_rows for {len(parts)} parts")
    for part, head in zip(parts, _head_rows(split, len(parts)), strict=True):
        if head is not None and part * split.groups % head:
            raise ConfigError(f"{where}: a part of {part * split.groups} rows is not made of heads of {head} rows")


def part_rows(rows: int, split: Split) -> tuple[int, ...]:
    """Rows of each part within one group."""
    if isinstance(split.parts, int):
        return (rows // split.groups // split.parts,) * split.parts
    return split.parts


def _head_rows(split: Split, parts: int) -> tuple[int | None, ...]:
    if isinstance(split.head_rows, tuple):
        return split.head_rows
    return (split.head_rows,) * parts


def split_matrices(tensor: torch.Tensor, split: Split | None) -> list[torch.Tensor]:
    """The matrices of a parameter-shaped tensor: 2-D, or 3-D where many of one shape lie together.

    Views where the memory allows it. The split has been checked (``matrices`` does).
    """
    if split is None:
        return [tensor]
    rows, columns = tensor.shape[-2:]
    parts = part_rows(rows, split)
    grouped = tensor.unflatten(-2, (split.groups, rows // split.groups))
    pieces = []
    for part, head in zip(grouped.split(parts, dim=-2), _head_rows(split, len(parts)), strict=True):
        matrix = part.flatten(-3, -2)
        if head is not None:
            matrix = matrix.reshape(-1, head, columns)
        pieces.append(matrix)
    return pieces


def join_matrices(pieces: Sequence[torch.Tensor], split: Split | None, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of ``split_matrices``: one tensor of ``shape``."""
    if split is None:
        return pieces[0]
    *experts, rows, columns = shape
    parts = part_rows(rows, split)
    grouped = [piece.reshape(*experts, split.groups, part, columns) for piece, part in zip(pieces, parts, strict=True)]
    return torch.cat(grouped, dim=-2).reshape(*shape)


def scale_factor(shape: Sequence[int], scale: Scale) -> float:
    """The factor of the update of a matrix of shape [..., out, in]."""
    out, inputs = shape[-2:]
    if callable(scale):
        factor = scale((out, inputs))
        if not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
            raise ConfigError(f"Muon: scale returned {factor!r} for a matrix of {out}×{inputs}: expected a number")
        return float(factor)
    if isinstance(scale, (int, float)):
        return float(scale)
    match scale:
        case None:
            return 1.0
        case "rms":
            return 0.2 * math.sqrt(max(out, inputs))
        case "spectral":
            return math.sqrt(max(1.0, out / inputs))
        case "ratio":
            return math.sqrt(out / inputs)
    raise ConfigError(f"unknown scale {scale!r}")


def join_directions(
    pieces: Sequence[torch.Tensor], split: Split | None, shape: Sequence[int], scale: Scale
) -> tuple[torch.Tensor, float]:
    """The direction of a whole parameter from those of its matrices, and the factor that remains to be applied.

    Each matrix has the factor of its own shape; where they differ, the direction comes back in fp32, scaled.
    """
    factors = [scale_factor(piece.shape, scale) for piece in pieces]
    if len(set(factors)) == 1:
        return join_matrices(pieces, split, shape), factors[0]
    scaled = [piece.float() * factor for piece, factor in zip(pieces, factors, strict=True)]
    return join_matrices(scaled, split, shape), 1.0


def finite(grads: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """A boolean for each gradient, on the device: it holds no infinity and no NaN. ``device``: where there are none."""
    if not grads:
        return torch.ones(0, dtype=torch.bool, device=device)
    # The largest magnitude is finite exactly if all elements are; a sum of squares can overflow on its own.
    # An empty gradient has none: a zero stands in for it.
    largest = private.foreach_norm([grad if grad.numel() else grad.new_zeros(1) for grad in grads], ord=math.inf)
    return torch.stack([norm.float() for norm in largest]).isfinite()


@torch.no_grad()
def momentum_(
    grads: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    momentum: float,
    nesterov: bool,
    refused: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Bring the momenta up to date, and return what is to be orthogonalised. Elementwise: any shape will do.

    Of a refused step, what is returned means nothing.
    """
    if not grads:
        return []
    if elementwise.fits(grads, momenta):
        return elementwise.momentum_(grads, momenta, momentum, nesterov, refused)
    if refused is None:
        private.foreach_lerp_(list(momenta), list(grads), 1 - momentum)
    else:
        _replace_unless(refused, momenta, private.foreach_lerp(list(momenta), list(grads), 1 - momentum))
    if not nesterov:
        return list(momenta)
    return private.foreach_lerp(list(grads), list(momenta), momentum)


@torch.no_grad()
def apply_(
    params: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    lr: float,
    weight_decay: float,
    factors: Sequence[float],
    refused: torch.Tensor | None = None,
) -> None:
    """p ← (1 − lr·weight_decay)·p − lr·factor·direction, elementwise. The decay does not depend on the factor."""
    if not params:
        return
    if elementwise.fits(params, directions):
        elementwise.apply_(params, directions, lr, weight_decay, factors, refused)
        return
    targets = list(params) if refused is None else [parameter.clone() for parameter in params]
    if weight_decay:
        private.foreach_mul_(targets, 1 - lr * weight_decay)
    for target, direction, factor in zip(targets, directions, factors, strict=True):
        target.add_(direction, alpha=-lr * factor)
    if refused is not None:
        _replace_unless(refused, params, targets)


def _replace_unless(refused: torch.Tensor, tensors: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
    """Selected, not multiplied: nothing of what is not finite gets through."""
    for tensor, value in zip(tensors, new, strict=True):
        tensor.copy_(torch.where(refused != 0, tensor, value))
