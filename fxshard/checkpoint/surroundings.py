"""What a resumed run needs besides model and optimizer: the states of random number generators."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


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
