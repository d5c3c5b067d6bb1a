"""State of a run besides tensors: of random number generators, and the extra state of modules."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of this rank's generators: torch's, Python's, and NumPy's if it is in use."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Continue with the random numbers that would have come next when ``random_states`` was called."""
    torch.set_rng_state(states["cpu"])
    random.setstate(states["python"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of a plain model that have a ``get_extra_state`` of their own, by name."""
    plain = nn.Module.get_extra_state
    return {name: module for name, module in model.named_modules() if type(module).get_extra_state is not plain}


def restore_extra_states(model: nn.Module, states: Mapping[str, Any]) -> list[str]:
    """Give modules what ``get_extra_state`` gave; returns the names of those for which there is nothing."""
    modules = modules_with_extra_state(model)
    for name in modules.keys() & states.keys():
        modules[name].set_extra_state(states[name])
    return sorted(modules.keys() - states.keys())
