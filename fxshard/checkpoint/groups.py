"""Param groups in a checkpoint: hyperparameters and members of each group, readable without reading a tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxshard._torch.errors import ConfigError, StateError
from fxshard.checkpoint.held import parameter_names
from fxshard.frontend.module import ShardedModule
from fxshard.optim.groups import check_loaded
from fxshard.optim.sharded import ShardedOptimizer
from fxshard.planner.stored_names import Source

_NOT_OPTIONS = ("params", "param_names")


def describe(model: ShardedModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's class, groups and step counts, as the manifest holds them."""
    names = parameter_names(model)
    groups = []
    for group in optimizer.param_groups:
        options = {key: _plain(key, value) for key, value in group.items() if _is_option(key, value)}
        groups.append({"params": [names[id(p)] for p in group["params"]], **options})
    steps = {
        names[id(parameter)]: int(state["step"])
        for parameter, state in optimizer.state.items()
        if "step" in state and id(parameter) in names
    }
    return {"class": type(optimizer).__name__, "groups": groups, "steps": steps}


def _is_option(key: str, value: Any) -> bool:
    """A function cannot be saved; the one of the optimizer that loads counts."""
    return key not in _NOT_OPTIONS and not callable(value)


def _plain(key: str, value: Any) -> Any:
    value = value.item() if isinstance(value, torch.Tensor) and not value.ndim else value
    try:
        json.dumps(value)
    except TypeError:
        raise ConfigError(
            f"the option {key!r} of a param group is a {type(value).__name__}, which cannot be saved: make it a "
            "number, a string, or a list of them"
        ) from None
    return value


def misfits(
    model: ShardedModule, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], sources: Mapping[str, Source]
) -> list[str]:
    """Why saved groups cannot be continued by this optimizer: other groups, coefficients, steps or members."""
    ours, theirs = optimizer.param_groups, saved["groups"]
    was, here = saved["class"].removeprefix("Sharded"), type(optimizer).__name__  # torch's AdamW continues ours
    if not isinstance(optimizer, ShardedOptimizer) and was != here:
        return [f"the optimizer is {was} there and {here} here"]
    if len(ours) != len(theirs):
        return [f"the optimizer has {len(theirs)} param groups there and {len(ours)} here"]
    if any("kind" in group for group in ours):
        try:
            check_loaded(ours, theirs)
        except StateError as error:
            return [str(error)]
    found = []
    names = parameter_names(model)
    for number, (own, there) in enumerate(zip(ours, theirs, strict=True)):
        needed = {stored for p in own["params"] for stored in stored_as(names[id(p)], sources)}
        if different := sorted(needed ^ set(there["params"])):
            found.append(f"param group {number} has other parameters there and here: {', '.join(different[:5])}")
    return found + _uneven_steps(sources, saved["steps"])


def restore(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Continue with the saved hyperparameters; those that the checkpoint does not know stay."""
    for group, theirs in zip(optimizer.param_groups, saved, strict=True):
        for key, value in theirs.items():
            if key in _NOT_OPTIONS:
                continue
            own = group.get(key)
            if isinstance(own, torch.Tensor):
                own.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) and not isinstance(own, list) else value


def stored_as(name: str, sources: Mapping[str, Source]) -> tuple[str, ...]:
    """The names that a parameter has in the checkpoint."""
    return sources[name].names if name in sources else (name,)


def _uneven_steps(sources: Mapping[str, Source], steps: Mapping[str, int]) -> list[str]:
    """Experts that made different numbers of steps cannot become one tensor, which has one count."""
    return [
        f"{name}: its parts made different numbers of steps"
        for name, source in sources.items()
        if source.stacked and len({steps.get(part) for part in source.names}) > 1
    ]
