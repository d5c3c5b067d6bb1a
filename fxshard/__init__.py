"""fxshard: a compiler for sharded training on PyTorch.

``fxshard.compile(model)`` captures a plain ``nn.Module``, shards its parameters, gradients and optimizer state over the
data-parallel ranks, and schedules every collective. The schedule is an object: ``print(model.schedule)``.

Names are imported when they are first used, so that ``fxshard --help`` does not wait for torch.
"""

import sys
from importlib import import_module
from multiprocessing import current_process
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fxshard._version import __version__
from fxshard.garbage import make_old, no_garbage_collection
from fxshard.log import set_up

if TYPE_CHECKING:
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
    from fxshard.explaining import explain
    from fxshard.fused.op import grouped_mm
    from fxshard.groups import Group
    from fxshard.inspect.files import ScheduleFileError
    from fxshard.inspect.schedule import Schedule
    from fxshard.inspect.step import ScheduleError
    from fxshard.module import ShardedModule
    from fxshard.passes.pass_list import PassList
    from fxshard.passes.pipeline import PASSES
    from fxshard.planning import plan
    from fxshard.precision.policy import MXFP8
    from fxshard.profile import Profile

_HOME = {
    "AdamW": "config",
    "BudgetError": "errors",
    "CaptureError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "FxshardError": "errors",
    "Group": "groups",
    "LayoutError": "errors",
    "MXFP8": "precision.policy",
    "Muon": "config",
    "PASSES": "passes.pipeline",
    "PassError": "errors",
    "PassList": "passes.pass_list",
    "PeerError": "errors",
    "Precision": "config",
    "Profile": "profile",
    "RankDivergenceError": "errors",
    "Schedule": "inspect.schedule",
    "ScheduleError": "inspect.step",
    "ScheduleFileError": "inspect.files",
    "ShardedModule": "module",
    "Split": "config",
    "StateError": "errors",
    "compile": "api",
    "explain": "explaining",
    "grouped_mm": "fused.op",
    "latest": "checkpoint",
    "load": "checkpoint",
    "plan": "planning",
    "save": "checkpoint",
    "shard": "api",
}
"""The module that each public name is in."""


class _Package(ModuleType):
    """``fxshard.plan`` is the function. The package of that name is reached by ``from fxshard.plan.x import y``."""

    def __getattr__(self, name: str) -> Any:
        if name == "checkpoint":  # fxshard.checkpoint.wait_for_save, without an import of its own
            return import_module("fxshard.checkpoint")
        if name not in _HOME:
            raise AttributeError(f"module 'fxshard' has no attribute {name!r}")
        # These processes take seconds to start: the rest is imported meanwhile. Not where a script is only imported
        # again, by each worker that a data loader spawns.
        with no_garbage_collection():
            if name in ("compile", "shard") and current_process().name == "MainProcess":
                import_module("fxshard.elsewhere").start()
            value = getattr(import_module(f"fxshard.{_HOME[name]}"), name)
            make_old()
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if name != "plan" or not isinstance(value, ModuleType):  # the import system puts packages here
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOME})


sys.modules[__name__].__class__ = _Package
set_up()
del set_up

__all__ = [
    "AdamW",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "FxshardError",
    "Group",
    "LayoutError",
    "MXFP8",
    "Muon",
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
    "save",
    "shard",
]
