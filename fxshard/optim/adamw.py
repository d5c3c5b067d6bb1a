"""AdamW over the flat shards of buckets: the formula is torch's fused kernel, a pass covers many buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxshard.optim.config import AdamW
from fxshard.optim.sharded import ShardedOptimizer
from fxshard.optim.verdict import Verdicts
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.engine import Engine


class ShardedAdamW(ShardedOptimizer):
    """What ``fxshard.compile(..., optimizer=fxshard.AdamW(...))`` makes; equal to ``torch.optim.AdamW``."""

    def __init__(self, engine: Engine, choice: AdamW) -> None:
        trained = [bucket for bucket in engine.buckets if bucket.plan.trainable]
        defaults = {"lr": choice.lr, "betas": choice.betas, "eps": choice.eps, "weight_decay": choice.weight_decay}
        verdicts = Verdicts(choice.nan, "AdamW") if choice.nan is not None else None
        super().__init__(engine, _groups(trained, choice), defaults, verdicts)


def _groups(buckets: Sequence[Bucket], choice: AdamW) -> list[dict[str, Any]]:
    """One group of parameters that decay, and one of those that do not, each where there are any."""
    members: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for bucket in buckets:
        for slot, parameter in zip(bucket.plan.layout.slots, bucket.params, strict=True):
            decays = choice.decay is None or choice.decay(slot.spec.name, slot.spec.shape)
            members[decays].append(parameter)
    return [
        {"params": params, "weight_decay": choice.weight_decay if decays else 0.0}
        for decays, params in members.items()
        if params
    ]
