"""The norm of all gradients, every element counted once: however parameters are sharded, replicated or spread."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.channels import Channels


def clip_gradients(
    buckets: Sequence[Bucket], channels: Channels, device: torch.device, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before.

    ``channels`` are those of the model's own ranks. Experts that live on some of them have ranks of their own, and are
    different on others: each rank counts what it is the first to hold, and one sum over all ranks covers everything.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    _check(max_norm, norm_type)
    norm = gradient_norm(buckets, channels, device, norm_type)
    if max_norm == math.inf:
        return norm
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in _by_dtype([gradient for bucket in buckets for gradient in _local_gradients(bucket)]):
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    return norm


def _check(max_norm: float, norm_type: float) -> None:
    """Raise for numbers with which torch's function turns gradients around, or makes zeros or NaN of them all."""
    if not max_norm > 0:
        raise ConfigError(
            f"clip_grad_norm_(max_norm={max_norm}): expected a number above 0. Leave the call out where nothing is to "
            "be clipped; math.inf only measures the norm"
        )
    if not norm_type > 0:
        raise ConfigError(f"clip_grad_norm_(norm_type={norm_type}): expected a number above 0, or math.inf")


def gradient_norm(
    buckets: Sequence[Bucket], channels: Channels, device: torch.device, norm_type: float
) -> torch.Tensor:
    """The norm over all ranks, in fp32 and equal on all of them. Collective."""
    largest = norm_type == torch.inf
    counted = [gradient for bucket in buckets for gradient in _local_gradients(bucket, only_counted=True)]
    total = torch.zeros((), dtype=torch.float32, device=device)
    norms = [norm for same in _by_dtype(counted) for norm in torch._foreach_norm(same, norm_type, dtype=torch.float32)]
    if norms:
        stacked = torch.stack(norms)
        total = stacked.max() if largest else stacked.pow(norm_type).sum()
    channels.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, "all_reduce of the gradient norm")
    return total if largest else total.pow(1 / norm_type)


def all_norms(
    buckets: Sequence[Bucket], channels: Channels, order: Sequence[str], *, of_gradients: bool
) -> dict[str, torch.Tensor]:
    """The norm of everything, by the name ``""``, and then of each gradient or parameter, in an order of names."""
    device = buckets[0].device
    found = norms_by_name(buckets, channels, device, of_gradients=of_gradients)
    place = {name: i for i, name in enumerate(order)}
    found = {name: found[name] for name in sorted(found, key=lambda name: place.get(name, -1))}
    every = torch.stack(list(found.values())).norm() if found else torch.zeros((), device=device)
    return {"": every, **found}


def norms_by_name(
    buckets: Sequence[Bucket], channels: Channels, device: torch.device, *, of_gradients: bool
) -> dict[str, torch.Tensor]:
    """The norm of each gradient (where there is one) or parameter, in fp32, on the device. Collective, with one sum.

    The host does not wait: a name that has a gradient on one rank has one on all.
    """
    names, squares = [], []
    for bucket in buckets:
        for fragment, parameter in zip(bucket.fragments, bucket.params, strict=True):
            value = parameter.grad if of_gradients else parameter
            if value is None:
                continue
            local = private.local_part(value)
            counted = fragment.numel and bucket.channels.counts(bucket.plan, fragment.name)
            norm = torch.linalg.vector_norm(local.detach(), dtype=torch.float32).square() if counted else None
            names.append(fragment.name)
            squares.append(norm if norm is not None else torch.zeros((), dtype=torch.float32, device=device))
    if not names:
        return {}
    total = torch.stack(squares)
    channels.all_reduce(total, dist.ReduceOp.SUM, "all_reduce of norms")
    return dict(zip(names, total.sqrt().unbind(), strict=True))


def _local_gradients(bucket: Bucket, *, only_counted: bool = False) -> list[torch.Tensor]:
    """This rank's rows of the gradients that are there; none of them empty."""
    found = []
    for name, parameter in bucket.named():
        gradient = parameter.grad
        if gradient is not None and (not only_counted or bucket.channels.counts(bucket.plan, name)):
            local = private.local_part(gradient)
            if local.numel():
                found.append(local.detach())
    return found


def _by_dtype(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    return list(kinds.values())
