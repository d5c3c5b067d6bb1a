"""fxshard: a compiler for sharded training on PyTorch.

``fxshard.compile(model)`` captures a plain ``nn.Module``, shards its parameters, gradients and optimizer state over the
data-parallel ranks, and schedules every collective. The schedule is an object: ``print(model.schedule)``.

Names are imported when they are first used, so that ``fxshard --help`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxshard._torch.log import set_up
from fxshard._version import __version__

if TYPE_CHECKING:
    from fxshard._torch.errors import (
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
    from fxshard.checkpoint import latest, load, save
    from fxshard.frontend.api import compile, shard
    from fxshard.frontend.ema import EMA
    from fxshard.frontend.frozen_linears import quantize_frozen
    from fxshard.frontend.groups import Group
    from fxshard.frontend.module import ShardedModule
    from fxshard.frontend.planning import explain, plan
    from fxshard.kernels.op import grouped_mm
    from fxshard.optim.config import AdamW, Muon, NorMuon, Split
    from fxshard.passes.options import Debug
    from fxshard.passes.pass_list import PassList
    from fxshard.passes.pipeline import PASSES
    from fxshard.planner.float8_policy import Float8
    from fxshard.planner.mxfp8_policy import MXFP8
    from fxshard.planner.precision import Precision
    from fxshard.schedule.files import ScheduleFileError
    from fxshard.schedule.profile import Profile
    from fxshard.schedule.schedule import Schedule
    from fxshard.schedule.step import ScheduleError

_HOME = {
    "AdamW": "optim.config",
    "BudgetError": "_torch.errors",
    "CaptureError": "_torch.errors",
    "CheckpointError": "_torch.errors",
    "ConfigError": "_torch.errors",
    "Debug": "passes.options",
    "EMA": "frontend.ema",
    "Float8": "planner.float8_policy",
    "FxshardError": "_torch.errors",
    "Group": "frontend.groups",
    "LayoutError": "_torch.errors",
    "MXFP8": "planner.mxfp8_policy",
    "Muon": "optim.config",
    "NorMuon": "optim.config",
    "PASSES": "passes.pipeline",
    "PassError": "_torch.errors",
    "PassList": "passes.pass_list",
    "PeerError": "_torch.errors",
    "Precision": "planner.precision",
    "Profile": "schedule.profile",
    "RankDivergenceError": "_torch.errors",
    "Schedule": "schedule.schedule",
    "ScheduleError": "schedule.step",
    "ScheduleFileError": "schedule.files",
    "ShardedModule": "frontend.module",
    "Split": "optim.config",
    "StateError": "_torch.errors",
    "compile": "frontend.api",
    "explain": "frontend.planning",
    "grouped_mm": "kernels.op",
    "latest": "checkpoint",
    "load": "checkpoint",
    "plan": "frontend.planning",
    "quantize_frozen": "frontend.frozen_linears",
    "save": "checkpoint",
    "shard": "frontend.api",
}
"""The module that each public name is in."""


def __getattr__(name: str) -> Any:
    if name == "checkpoint":  # fxshard.checkpoint.wait_for_save, without an import of its own
        return import_module("fxshard.checkpoint")
    if name not in _HOME:
        raise AttributeError(f"module 'fxshard' has no attribute {name!r}")
    value = getattr(import_module(f"fxshard.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


set_up()
del set_up

__all__ = [
    "AdamW",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "Debug",
    "EMA",
    "Float8",
    "FxshardError",
    "Group",
    "LayoutError",
    "MXFP8",
    "Muon",
    "NorMuon",
    "PASSES",
    "PassError",
    "PassList",
    "PeerError",
    "Precision",
    "Profile",
    "RankDivergenceError",
    "Schedule",
    "ScheduleError",
    "ScheduleFileError",
    "ShardedModule",
    "Split",
    "StateError",
    "__version__",
    "compile",
    "explain",
    "grouped_mm",
    "latest",
    "load",
    "plan",
    "quantize_frozen",
    "save",
    "shard",
]
