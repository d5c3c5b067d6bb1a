"""From gradients and momenta to the directions that parameters move in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fxshard.optim import muon_rule as rule
from fxshard.optim.config import Scale, Split
from fxshard.optim.newton_schulz import orthogonalize
from fxshard.optim.row_moments import row_factors_, scaled
from fxshard.optim.start import Momentum


def alike(groups: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Positions of groups that go through the same iteration with the same momentum: their matrices share batches."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for i, group in enumerate(groups):
        key = tuple(group.get(field) for field in ("momentum", "nesterov", "steps", "coefficients", "beta2"))
        found.setdefault(key, []).append(i)
    return list(found.values())


def apply_by_group(
    values: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    factors: Sequence[float],
    groups: Sequence[Mapping[str, Any]],
    refused: torch.Tensor | None,
) -> None:
    """``muon_rule.apply_``, each value with the learning rate and decay of its group."""
    for group in {id(group): group for group in groups}.values():
        chosen = [i for i, other in enumerate(groups) if other is group]
        of_group = [values[i] for i in chosen], [directions[i] for i in chosen]
        rule.apply_(of_group[0], of_group[1], group["lr"], group["weight_decay"], [factors[i] for i in chosen], refused)


def moved_directions(
    grads: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    splits: Sequence[Split | None],
    group: Mapping[str, Any],
    scales: Sequence[Scale],
    form: str,
    refused: torch.Tensor | None = None,
    seconds: Sequence[torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], list[float]]:
    """Bring the momenta up to date; the orthogonalized updates, and the factors that remain to be applied to them.

    ``group`` says how momentum and iteration go, which is the same for all; scales may differ. With ``seconds``, the
    second moments of rows, these are brought up to date and rows are normalized by them (NorMuon).
    Unless the number ``refused`` is there and not zero: then the momenta stay, and the updates mean nothing.
    """
    in_place = [_cut_in_place(buffer, split) for buffer, split in zip(momenta, splits, strict=True)]
    pieces: dict[int, list[torch.Tensor]] = {}
    for moving in (True, False):
        chosen = [i for i, fits in enumerate(in_place) if fits is moving]
        buffers, of_chosen = [momenta[i] for i in chosen], [grads[i] for i in chosen]
        cuts = [splits[i] for i in chosen]
        if not moving:
            buffers = rule.momentum_(of_chosen, buffers, group["momentum"], group["nesterov"], refused)
        done = orthogonal_pieces(buffers, cuts, group, form, of_chosen if moving else None, refused)
        pieces.update(zip(chosen, done, strict=True))
    if seconds is not None:
        factors = row_factors_([pieces[i] for i in range(len(momenta))], seconds, splits, group["beta2"], refused)
        pieces = {i: scaled(pieces[i], of_rows) for i, of_rows in enumerate(factors)}
    joined = [
        rule.join_directions(pieces[i], split, buffer.shape, scale)
        for i, (split, buffer, scale) in enumerate(zip(splits, momenta, scales, strict=True))
    ]
    return [direction for direction, _ in joined], [factor for _, factor in joined]


def orthogonal_pieces(
    updates: Sequence[torch.Tensor],
    splits: Sequence[Split | None],
    group: Mapping[str, Any],
    form: str,
    grads: Sequence[torch.Tensor] | None = None,
    refused: torch.Tensor | None = None,
) -> list[list[torch.Tensor]]:
    """The matrices of each update, orthogonalized. All at once, so that equal shapes make one batch.

    With ``grads``, the updates are momentum buffers, to be brought up to date on the way, unless ``refused``.
    """
    pieces = [rule.split_matrices(update, split) for update, split in zip(updates, splits, strict=True)]
    matrices = [matrix for of_one in pieces for matrix in of_one]
    momentum = None
    if grads is not None:
        parts = [part for grad, split in zip(grads, splits, strict=True) for part in rule.split_matrices(grad, split)]
        momentum = Momentum(parts, group["momentum"], group["nesterov"], refused)
    done = iter(
        orthogonalize(matrices, steps=group["steps"], coefficients=group["coefficients"], form=form, momentum=momentum)
    )
    return [[next(done) for _ in of_one] for of_one in pieces]


def _cut_in_place(tensor: torch.Tensor, split: Split | None) -> bool:
    """Whether the matrices of a split are views: only then does writing to them write to the tensor."""
    if split is None:
        return True
    storage = tensor.untyped_storage().data_ptr()
    return all(part.untyped_storage().data_ptr() == storage for part in rule.split_matrices(tensor, split))
