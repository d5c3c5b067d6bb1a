"""Training with optimizer state in fewer bits, and what it is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fxshard
from tests.optim.state_reference import LINES, Kinds, Reference, bf16, drawn, eight_bits
from tests.stack import wide
from tests.training import random_gradients, stepped

LR = 1e-2
FORMATS, PLACES = ("fp32", "bf16", "8bit"), ("none", "host")


def sharded(choice: fxshard.AdamW | fxshard.Muon, **options: Any) -> fxshard.ShardedModule:
    return fxshard.shard(Kinds(), optimizer=choice, **options)


def train(model: fxshard.ShardedModule, seeds: range) -> dict[str, torch.Tensor]:
    return stepped(model, Kinds, seeds)


def moments(model: fxshard.ShardedModule) -> dict[str, torch.Tensor]:
    """This rank's rows of all state, copied."""
    found = {}
    for name, parameter in model.named_parameters():
        for field, value in model.optimizer.state[parameter].items():
            local = value.to_local() if isinstance(value, dist.tensor.DTensor) else value
            found[f"{name}.{field}"] = local.detach().clone()
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def wrong(found: dict[str, torch.Tensor], wanted: dict[str, Reference], format: str) -> list[str]:
    """Parameters that are not the reference's, bit by bit. What stays fp32 is updated by torch's own kernel, which
    rounds in another order."""
    return [
        name
        for name, reference in wanted.items()
        if not (
            np.allclose(found[name].numpy().reshape(-1), reference.p, rtol=1e-5, atol=1e-6)
            if format == "8bit" and not LINES[name]
            else np.array_equal(found[name].numpy().reshape(-1), reference.p)
        )
    ]


def momentum_reference(format: str, steps: range) -> dict[str, torch.Tensor]:
    """Muon over plain tensors, whose momentum is rounded after every step by the reference."""
    plain = wide()
    optimizer = fxshard.Muon(lr=LR).build(plain)
    for step in steps:
        for name, grad in random_gradients(wide(), step).items():
            plain.get_parameter(name).grad = grad
        optimizer.step()
        for name, parameter in plain.named_parameters():
            state = optimizer.state[parameter]
            if "momentum_buffer" not in state:
                continue
            chance = drawn(name, step + 1, parameter.numel(), False)
            values = state["momentum_buffer"].numpy().reshape(-1)
            made = bf16(values, chance) if format == "bf16" else eight_bits(values, parameter.shape[-1], True, chance)
            state["momentum_buffer"].copy_(torch.from_numpy(made).view_as(parameter))
    return {name: p.detach().clone() for name, p in plain.named_parameters() if p.ndim == 2}
