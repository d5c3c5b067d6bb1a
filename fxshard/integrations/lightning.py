"""The ``Trainer`` of ``lightning.pytorch``: a strategy that shards and compiles with fxshard.

from lightning.pytorch import Trainer
from fxshard.integrations.lightning import FxshardStrategy

trainer = Trainer(strategy=FxshardStrategy(zero=3), devices=8)
trainer.fit(module, loader)
"""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy

from fxshard.integrations.lightning_strategy import ClipsShards, TrainerStrategy


class _Precision(ClipsShards, Precision):
    pass


class FxshardStrategy(TrainerStrategy, DDPStrategy):
    __doc__ = TrainerStrategy.__doc__
    precision_class = _Precision
