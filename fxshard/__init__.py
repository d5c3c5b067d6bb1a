"""fxshard: a compiler for sharded training on PyTorch.

``fxshard.compile(model)`` captures a plain ``nn.Module``, shards its parameters, gradients and optimizer state over the
data-parallel ranks, and schedules every collective. The schedule is an object: ``print(model.schedule)``.
"""

from fxshard._version import __version__
from fxshard.api import compile, shard
from fxshard.checkpoint import latest, load, save
from fxshard.config import AdamW, Muon, Precision, Split
from fxshard.errors import (
    BudgetError,
    CaptureError,
    CheckpointError,
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

__all__ = [
    "AdamW",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "FxshardError",
    "LayoutError",
    "Muon",
    "PassError",
    "PeerError",
    "Precision",
    "RankDivergenceError",
    "Schedule",
    "ScheduleError",
    "ScheduleFileError",
    "ShardedModule",
    "Split",
    "StateError",
    "__version__",
    "compile",
    "latest",
    "load",
    "plan",
    "save",
    "shard",
]
