"""Random training loops: lists of actions that run alike on a plain model and on a sharded one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxshard.bench.fuzz.models import WIDTH

Backward = Callable[[str, str, int], float]
"""Forward of the heads in the first string, and backward from those in the second, for the batch of a number."""


class Loop:
    """What a program does: made from a seed, the same each time."""

    def __init__(self, seed: int) -> None:
        choice = random.Random(seed + 1)
        self.optimizer = choice.choice(["adamw", "sgd", "own"])
        self.actions = [(choice.choice(list(ACTIONS)), choice.randrange(10**6)) for _ in range(choice.randint(3, 8))]

    def __str__(self) -> str:
        return f"{self.optimizer}: " + ", ".join(name for name, _ in self.actions)

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Backward) -> list[Any]:
        """Everything that can be compared, action by action."""
        found: list[Any] = []
        for name, seed in self.actions:
            found.append((name, *ACTIONS[name](model, optimizer, backward, random.Random(seed))))
        return found


def step(model: nn.Module, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    """A step with one head, with both, or with a loss of one of two results."""
    forward, used = choice.choice([("a", "a"), ("b", "b"), ("ab", "ab"), ("ab", "a"), ("ab", "b")])
    loss = backward(forward, used, choice.randrange(10**6))
    none = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    optimizer.step()
    optimizer.zero_grad(set_to_none=choice.random() < 0.8)
    return loss, none


def accumulated(model: nn.Module, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    """Two micro-batches before a step, which may use different heads."""
    losses = [backward(head, head, choice.randrange(10**6)) for head in choice.choice(["aa", "ab", "ba"])]
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    optimizer.step()
    optimizer.zero_grad()
    return *losses, float(norm)


def evaluate(model: nn.Module, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(choice.randrange(10**6)))
    model.eval()
    with torch.no_grad():
        found = [float(loss) for loss in model(x, "ab")]
    model.train()
    return found


def write_data(model: Any, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    """Attributes of the model and of its parts."""
    model.temperature = choice.uniform(0.5, 2)
    for module in model.modules():
        if hasattr(module, "gain"):
            module.gain = choice.uniform(0.5, 2)
    return ()


def write_buffers(model: Any, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    for module in model.modules():
        if "shift" in module._buffers:
            module.shift = torch.full((WIDTH,), choice.uniform(-1, 1))
    return ()


def write_weights(model: Any, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    factor = choice.uniform(0.5, 1.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return ()


def rate(model: Any, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    for group in optimizer.param_groups:
        group["lr"] = choice.uniform(1e-3, 1e-1)
    return ()


def hook(model: Any, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    """A forward hook of a part, for one step."""
    factor = choice.uniform(0.5, 2)
    handle = model.heads["a"].register_forward_hook(lambda module, args, out: out * factor)
    found = step(model, optimizer, backward, choice)
    handle.remove()
    return found


ACTIONS = {
    "step": step,
    "another step": step,
    "accumulated": accumulated,
    "evaluate": evaluate,
    "write data": write_data,
    "write buffers": write_buffers,
    "write weights": write_weights,
    "rate": rate,
    "hook": hook,
}
