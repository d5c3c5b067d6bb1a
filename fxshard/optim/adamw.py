"""AdamW over the shards of buckets: the formula is torch's fused kernel, a call of it covers many buckets."""

from __future__ import annotations

from collections.abc import Sequence

from fxshard.optim.config import AdamW
from fxshard.optim.groups import param_groups
from fxshard.optim.sharded import ShardedOptimizer, in_order
from fxshard.optim.verdict import Verdicts
from fxshard.runtime.engine import Engine


class ShardedAdamW(ShardedOptimizer):
    """The optimizer of ``fxshard.compile(..., optimizer=fxshard.AdamW(...))``; equal to ``torch.optim.AdamW``.

    ``order``: the names of the model's parameters as ``parameters()`` gives them.
    """

    def __init__(self, engine: Engine, choice: AdamW, order: Sequence[str], decided: bool) -> None:
        defaults = {"lr": choice.lr, "betas": choice.betas, "eps": choice.eps, "weight_decay": choice.weight_decay}
        verdicts = Verdicts(choice.nan, "AdamW") if choice.nan is not None else None
        groups = param_groups(choice, in_order(engine, order))
        super().__init__(engine, groups, defaults, verdicts, choice.qk_clip, decided)
