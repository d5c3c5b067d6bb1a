"""What runs in MXFP8 or float8, how it travels, and how products are computed, as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from fxshard._torch.errors import StateError
from fxshard.kernels import float8_grouped, float8_products
from fxshard.kernels.mxfp8_products import grouped_path, path
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.gather_modes import Gather
from fxshard.planner.quantized import Quantized, choose_linears


@dataclass(frozen=True)
class Report:
    """``print`` it."""

    name: str
    """Of the policy."""
    path: str
    """How products are computed on this machine."""
    grouped: str
    """How those of experts are; empty if no stack of weights is chosen."""
    quantizer: str
    weights: tuple[str, ...]
    gathers: dict[str, int]
    """How many weights travel in which way."""
    left_out: dict[str, str]
    """Linears and experts in bf16, with the reason."""

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {len(self.weights)} weights, {len(self.left_out)} linears left in bf16",
            f"  products   {self.path}",
            *([f"  experts    {self.grouped}"] if self.grouped else []),
            f"  quantizer  {self.quantizer}",
        ]
        lines += [f"  gather     {how}: {count} weights" for how, count in self.gathers.items()]
        lines += [f"  in bf16    {name}: {why}" for name, why in self.left_out.items()]
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """What a model that was compiled with ``fxshard.MXFP8`` or ``fxshard.Float8`` does.

    >>> print(report(model))
    """
    from fxshard.frontend.module import ShardedModule
    from fxshard.kernels.quantize import runs_on

    policy = model._sharding.precision if isinstance(model, ShardedModule) else None
    if not isinstance(model, ShardedModule) or not isinstance(policy, Quantized):
        raise StateError(
            "this model was not compiled with precision=fxshard.MXFP8(...) or fxshard.Float8(...): nothing in it is "
            "quantized"
        )
    sharding, recipe = model._sharding, policy.recipe
    device = sharding.buckets[0].device if sharding.buckets else torch.device("cpu")
    plans = [plan for plan in sharding.plans if plan.quantized]
    stacks = any(len(slot.spec.shape) == 3 for plan in plans for slot in plan.layout.slots)
    return Report(
        name=policy.name,
        path=path(device) if recipe is None else float8_products.path(device, recipe.scaling),
        grouped="" if not stacks else grouped_path(device) if recipe is None else float8_grouped.grouped_path(device),
        quantizer="Triton, both copies in one pass" if runs_on(device) else "torch",
        weights=tuple(name for plan in plans for name in plan.params),
        gathers=dict(Counter(_how(plan) for plan in plans for _ in plan.params)),
        left_out=choose_linears(model._inner, sharding.precision).left_out,
    )


def _how(plan: BucketPlan) -> str:
    if plan.rests_quantized and plan.layout.ranks == 1:
        return "nothing travels, this rank quantizes its own"
    if plan.float8 is not None and plan.gather is Gather.DIRECT:
        two = plan.float8.copies == 2
        which = "rowwise in forward and columnwise in backward" if two else "one copy for both directions"
        return f"float8 travels, quantized by its owners with scales of all ranks, {which}"
    return {
        Gather.OFF: "off: bf16 travels and is quantized where it is used",
        Gather.STAGED: "staged: bf16 travels and is quantized once on every rank",
        Gather.DIRECT: "direct: quantized copies travel, rowwise in forward and columnwise in backward",
    }[plan.gather]
