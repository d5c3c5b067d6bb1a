"""fxshard: a compiler for sharded training on PyTorch.

``fxshard.compile(model)`` captures a plain ``nn.Module``, shards its parameters, gradients and optimizer state over the
data-parallel ranks, and schedules every collective. The schedule is an object: ``print(model.schedule)``.
"""

from fxshard._version import __version__
from fxshard.api import compile, shard
from fxshard.config import AdamW, Precision
from fxshard.errors import (
    BudgetError,
    CaptureError,
    ConfigError,
    FxshardError,
    LayoutError,
    PassError,
    PeerError,
    RankDivergenceError,
    StateError,
)
from fxshard.inspect.files import ScheduleFileError
from fxshard.inspect.schedule import Schedule
from fxshard.inspect.verify import ScheduleError
from fxshard.module import ShardedModule

# Last: ``fxshard.plan`` is the function; the package of the same name is reached by ``from fxshard.plan.x import y``.
from fxshard.planning import plan
from fxshard.precision.policy import MXFP8

__all__ = [
    "AdamW",
    "BudgetError",
    "CaptureError",
    "ConfigError",
    "FxshardError",
    "LayoutError",
    "MXFP8",
    "PassError",
    "PeerError",
    "Precision",
    "RankDivergenceError",
    "Schedule",
    "ScheduleError",
    "ScheduleFileError",
    "ShardedModule",
    "StateError",
    "__version__",
    "compile",
    "plan",
    "shard",
]
