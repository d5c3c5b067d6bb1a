"""From gradients and momenta to the directions that parameters move in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fxshard.optim import muon_rule as rule
from fxshard.optim.config import Split
from fxshard.optim.newton_schulz import orthogonalize
from fxshard.optim.row_moments import row_factors_, scaled
from fxshard.planner.optimizer_step import parts_within

MOST_NUMEL = 2**29


def alike(groups: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Positions of groups that go through the same iteration with the same momentum: their matrices share batches."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for i, group in enumerate(groups):
        key = tuple(group.get(field) for field in ("momentum", "nesterov", "steps", "coefficients", "beta2"))
        found.setdefault(key, []).append(i)
    return list(found.values())


def in_turns(groups: Sequence[Mapping[str, Any]], values: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """``alike``, with a limit to what is updated together: a step takes six bytes more for each element of those."""
    for members in alike(groups):
        yield from parts_within(members, lambda i: values[i].numel(), MOST_NUMEL)


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


def update_(
    values: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    splits: Sequence[Split | None],
    groups: Sequence[Mapping[str, Any]],
    form: str,
    refused: torch.Tensor | None,
    seconds: Sequence[torch.Tensor] | None,
) -> None:
    """A step of Muon: momenta and values move. With ``seconds``, the second moments of rows, these move as well, and
    rows are normalized by them (NorMuon).

    All go through the same iteration (``alike``); learning rate, decay and scale are those of each one's group. Unless
    the number ``refused`` is there and not zero: then everything stays.
    """
    group = groups[0]
    updates = rule.momentum_(grads, momenta, group["momentum"], group["nesterov"], refused)
    pieces = orthogonal_pieces(updates, splits, group, form)
    if seconds is not None:
        factors = row_factors_(pieces, seconds, splits, group["beta2"], refused)
        pieces = [scaled(of_one, of_rows) for of_one, of_rows in zip(pieces, factors, strict=True)]
    joined = [
        rule.join_directions(of_one, split, value.shape, own["scale"])
        for of_one, split, value, own in zip(pieces, splits, values, groups, strict=True)
    ]
    directions, remaining = zip(*joined, strict=True)
    apply_by_group(values, directions, remaining, groups, refused)


def orthogonal_pieces(
    updates: Sequence[torch.Tensor], splits: Sequence[Split | None], group: Mapping[str, Any], form: str
) -> list[list[torch.Tensor]]:
    """The matrices of each update, orthogonalized. All at once, so that equal shapes make one batch."""
    pieces = [rule.split_matrices(update, split) for update, split in zip(updates, splits, strict=True)]
    matrices = [matrix for of_one in pieces for matrix in of_one]
    done = iter(orthogonalize(matrices, steps=group["steps"], coefficients=group["coefficients"], form=form))
    return [[next(done) for _ in of_one] for of_one in pieces]
