"""AdamW's step over buckets, however their state is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fxshard._torch import private
from fxshard.optim.host import Transfers
from fxshard.optim.moments import Moments
from fxshard.optim.packed import Numbers, Stored, adamw_

Group = Mapping[str, Any]
Exact = tuple[torch.Tensor, ...]
"""(parameter, gradient, both moments, step) of what torch's kernel updates."""


def adamw_step(chosen: Sequence[Moments], group_of: Mapping[str, Group], refused: torch.Tensor | None) -> None:
    """Update every parameter of AdamW's that has a gradient. Its steps have been counted."""
    for transfers in dict.fromkeys(moments.transfers for moments in chosen):
        _update([moments for moments in chosen if moments.transfers is transfers], group_of, transfers, refused)


def _update(
    chosen: Sequence[Moments],
    group_of: Mapping[str, Group],
    transfers: Transfers | None,
    refused: torch.Tensor | None,
) -> None:
    """A step where all moments are on the device, or all on the host."""
    pieces = [(moments, *piece) for moments in chosen for piece in moments.pieces()]
    kept = [moments.moments(i, begin, end) for moments, i, begin, end in pieces]
    exact: dict[int, list[Exact]] = {}
    on_device: Iterable[list[Stored]] = kept if transfers is None else transfers.streamed(kept)
    # What is streamed goes back when the next is asked for, and the last when there is no next: strict asks for it.
    for (moments, i, begin, end), (first, second) in zip(pieces, on_device, strict=True):
        bucket, fragment = moments.bucket, moments.fragments[i]
        assert bucket.grad is not None
        group = group_of[fragment.name]
        where = slice(fragment.offset + begin, fragment.offset + end)
        if not first.exact:
            numbers = Numbers.of(group, moments.counts[i], bucket.device)
            noise = moments.noise(i, moments.counts[i], begin)
            adamw_(bucket.master[where], bucket.grad[where], first, second, noise, numbers, refused)
            continue
        tensors = (bucket.master[where], bucket.grad[where], first.values, second.values, moments.steps[i])
        if transfers is None:
            exact.setdefault(id(group), []).append(tensors)
        else:  # before the next piece comes
            fused_(group, [tensors], refused)
    groups = {id(group): group for group in group_of.values()}
    for key, together in exact.items():
        fused_(groups[key], together, refused)


def fused_(group: Group, together: Sequence[Sequence[torch.Tensor]], refused: torch.Tensor | None) -> None:
    """AdamW by torch's kernel over (master, gradient, moments, step) of each piece."""
    masters, grads, firsts, seconds, steps = (list(column) for column in zip(*together, strict=True))
    private.fused_adamw(
        masters,
        grads,
        firsts,
        seconds,
        steps,
        lr=group["lr"],
        betas=group["betas"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group.get("maximize", False),
        refused=refused,
    )
