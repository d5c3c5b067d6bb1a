"""AdamW's step over buckets, however their state is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fxshard._torch import private
from fxshard.optim import exact_kernels
from fxshard.optim.host import Transfers
from fxshard.optim.moments import Moments
from fxshard.optim.packed import Numbers, Stored, adamw_, note_largest
from fxshard.plan.float8_copies import Float8Copies

Group = Mapping[str, Any]
Exact = tuple[torch.Tensor, ...]
"""(parameter, gradient, both moments, step) of what torch's kernel updates."""


def adamw_step(
    chosen: Sequence[Moments],
    group_of: Mapping[str, Group],
    transfers: Transfers | None,
    refused: torch.Tensor | None,
    final: bool,
) -> None:
    """Update every parameter of AdamW's that has a gradient. Its steps have been counted.

    ``final``: nothing is written to the masters after it in this step. Then the updates leave the largest magnitudes of
    weights in float8, of which their next scales are made.
    """
    pieces = [(moments, *piece) for moments in chosen for piece in moments.pieces()]
    kept = [moments.moments(i, begin, end) for moments, i, begin, end in pieces]
    wanted = {id(moments): _wanted(moments, final) for moments in chosen}
    exact: dict[int, list[Exact]] = {}
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    on_device: Iterable[list[Stored]] = kept if transfers is None else transfers.streamed(kept)
    # What is streamed goes back when the next is asked for, and the last when there is no next: strict asks for it.
    for (moments, i, begin, end), (first, second) in zip(pieces, on_device, strict=True):
        bucket, fragment = moments.bucket, moments.fragments[i]
        assert bucket.grad is not None
        group, all_largest = group_of[fragment.name], wanted[id(moments)]
        where = slice(fragment.offset + begin, fragment.offset + end)
        largest = all_largest[i : i + 1] if all_largest is not None else None
        if not first.exact:
            numbers = Numbers.of(group, moments.counts[i], bucket.device)
            noise = moments.noise(i, moments.counts[i], begin)
            adamw_(bucket.master[where], bucket.grad[where], first, second, noise, numbers, refused, largest)
            continue
        tensors = (bucket.master[where], bucket.grad[where], first.values, second.values, moments.steps[i])
        if largest is not None and bucket.device.type == "cuda":
            exact_kernels.adamw_(group, tensors, largest, refused)
            continue
        if largest is not None:
            written.append((tensors[0], largest))
        if transfers is None:
            exact.setdefault(id(group), []).append(tensors)
        else:  # before the next piece comes
            fused_(group, [tensors], refused)
    groups = {id(group): group for group in group_of.values()}
    for key, together in exact.items():
        fused_(groups[key], together, refused)
    for master, largest in written:
        note_largest(master, largest)


def _wanted(moments: Moments, final: bool) -> torch.Tensor | None:
    """Where an update of all that a bucket holds is to leave the largest magnitude of each of its weights, as zeros.

    None where nobody asks for them, or where the update is not of all or not by a kernel that can.
    """
    bucket = moments.bucket
    if not isinstance(bucket.copies, Float8Copies):
        return None
    alone = not moments.muon and not bucket.plan.shares_state and bucket.master.dtype == torch.float32
    able = bucket.device.type != "cuda" or exact_kernels.HAS_TRITON
    complete = all(parameter.grad is not None for parameter in bucket.params)
    return bucket.copies.expect_update(final and alone and able and complete)


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
