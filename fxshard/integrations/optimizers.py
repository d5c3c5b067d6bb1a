"""Optimizers that were made for a plain model, carried over to its shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from fxshard import ConfigError, ShardedModule


def names_of(model: nn.Module) -> dict[int, str]:
    """{identity of a parameter: its name}, asked for before the model is sharded."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def trains(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def check_unused(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse an optimizer that has state of a plain model's parameters, before the model is sharded."""
    if any(state.get("step") != 0 for state in optimizer.state.values()) and owns(optimizer, names):
        raise ConfigError(
            f"this {type(optimizer).__name__} has state of the plain model's parameters: prepare it before its first "
            "step, or save the state and load it after prepare()"
        )


def carry_over(optimizer: torch.optim.Optimizer, names: Mapping[int, str], model: ShardedModule) -> None:
    """Let an optimizer update a sharded model where it was made for the plain one.

    Groups and what they say stay as they are, and so does the optimizer: a learning-rate scheduler goes on working.
    Parameters of other models are left alone.
    """
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        for i, plain in enumerate(group["params"]):
            if id(plain) in names:
                group["params"][i] = shard = sharded[names[id(plain)]]
                if plain in optimizer.state:
                    optimizer.state[shard] = _first_state(optimizer.state.pop(plain), shard)


def _first_state(state: Mapping[str, torch.Tensor], shard: torch.Tensor) -> dict[str, torch.Tensor]:
    """State that an optimizer is made with, before any step: Adagrad's sums, which have one value everywhere."""
    return {
        name: value if name == "step" else torch.full_like(shard, value.flatten()[0].item(), requires_grad=False)
        for name, value in state.items()
    }


def are_all(parameters: Iterable[torch.Tensor], model: ShardedModule) -> bool:
    """Whether these are what a sharded model trains, all of it and nothing else: its own norm is then theirs."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return {id(parameter) for parameter in parameters if parameter.requires_grad} == trained


def owns(optimizer: torch.optim.Optimizer, parameters: Mapping[int, object]) -> bool:
    """Whether an optimizer updates any of some parameters, given by identity."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])
