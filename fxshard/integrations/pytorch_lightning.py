"""The ``Trainer`` of ``pytorch_lightning``: a strategy that shards and compiles with fxshard.

from pytorch_lightning import Trainer
from fxshard.integrations.pytorch_lightning import FxshardStrategy

trainer = Trainer(strategy=FxshardStrategy(zero=3), devices=8)
trainer.fit(module, loader)
"""

from __future__ import annotations

from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy

from fxshard.integrations.lightning_strategy import ClipsShards, TrainerStrategy


class _Precision(ClipsShards, Precision):
    pass


class FxshardStrategy(TrainerStrategy, DDPStrategy):
    __doc__ = TrainerStrategy.__doc__
    precision_class = _Precision
