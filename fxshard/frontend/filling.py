"""Sharding takes a model's parameters over into buckets: one at a time, freeing each, or as they are made."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fxshard._torch import private
from fxshard.frontend.materialise import Init, is_meta, materialise
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.domain import Domain
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.channels import Channels
from fxshard.runtime.hollow import make_hollow, refuse_copies


def fill(
    model: nn.Module,
    plans: tuple[BucketPlan, ...],
    channels: Mapping[Domain, Channels],
    device: torch.device,
    init: Init | None,
) -> tuple[list[Bucket], dict[str, nn.Parameter]]:
    """Move the model's parameters into buckets; returns these and what is left of the parameters."""
    if is_meta(model):
        buckets = [Bucket(plan, channels[plan.domain], device) for plan in plans]
        return buckets, _make_real(model, buckets, device, init)
    originals = dict(model.named_parameters())
    buckets = []
    for plan in plans:
        bucket = Bucket(plan, channels[plan.domain], device)
        _move_in(bucket, originals)
        buckets.append(bucket)
    return buckets, originals


def _move_in(bucket: Bucket, originals: dict[str, nn.Parameter]) -> None:
    """Take the bucket's parameters over from the model, one at a time, freeing each one once it is copied.

    The values of the first rank that holds them win: replicas must start equal, and ranks that were seeded differently
    would otherwise train a model that is a patchwork of theirs.
    """
    bucket.make_params(originals)
    for name in bucket.plan.params:
        _take_over(bucket, name, originals[name])
    _settle(bucket)


def _make_real(
    model: nn.Module, buckets: list[Bucket], device: torch.device, init: Init | None
) -> dict[str, nn.Parameter]:
    """Materialise a model on the meta device into buckets, module by module; returns its hollow parameters."""
    home = {name: bucket for bucket in buckets for name in bucket.plan.params}
    originals = dict(model.named_parameters())
    for bucket in buckets:
        bucket.make_params(originals)
    try:
        return materialise(model, device, init, lambda name, value: _take_over(home[name], name, value))
    finally:
        for bucket in buckets:
            _settle(bucket)


def _take_over(bucket: Bucket, name: str, parameter: nn.Parameter) -> None:
    value = private.local_part(parameter).detach().contiguous()
    bucket.channels.broadcast(value)
    if bucket.tensor is not None and bucket.tensor.pieces[name].dim is None:
        bucket.tensor.broadcast(value)
    bucket.load({name: value})
    make_hollow(parameter, bucket.plan.param_dtype)
    refuse_copies(parameter)


def _settle(bucket: Bucket) -> None:
    """Where nothing is ever gathered, the unsharded parameters follow the shard once."""
    if bucket.full is not None and bucket.plan.layout.ranks == 1:
        with torch.no_grad():
            own = bucket.own_slice(bucket.full)
            if own.data_ptr() != bucket.master.data_ptr():
                own.copy_(bucket.master)
