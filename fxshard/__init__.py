"""fxshard: a compiler for sharded training on PyTorch.

``fxshard.compile(model)`` captures a plain ``nn.Module``, shards its parameters, gradients and optimizer state over the
data-parallel ranks, and schedules every collective. The schedule is an object: ``print(model.schedule)``.
"""

from fxshard._version import __version__
from fxshard.api import compile, shard
from fxshard.config import AdamW, Precision
from fxshard.errors import (
    CaptureError,
    ConfigError,
    FxshardError,
    LayoutError,
    PassError,
    PeerError,
    RankDivergenceError,
    StateError,
)
from fxshard.inspect.schedule import Schedule
from fxshard.module import ShardedModule

__all__ = [
    "AdamW",
    "CaptureError",
    "ConfigError",
    "FxshardError",
    "LayoutError",
    "PassError",
    "PeerError",
    "Precision",
    "RankDivergenceError",
    "Schedule",
    "ShardedModule",
    "StateError",
    "__version__",
    "compile",
    "shard",
]
