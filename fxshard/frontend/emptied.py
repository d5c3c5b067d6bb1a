"""What is left of the plain model after sharding has no values: using it is an error that says what to use instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxshard._torch.errors import StateError
from fxshard.frontend.sharding import sharding_of
from fxshard.runtime.hollow import is_hollow

_hook: Any = None


def refuse_uses(plain: nn.Module) -> None:
    """From now on a call of the emptied model is refused, its state dicts, and the step of an optimizer made for it."""
    global _hook
    for module in (plain, *plain.children()):  # not all: Dynamo has to look at each hook
        module.register_forward_pre_hook(_before_forward)
    for module in plain.modules():
        module.register_state_dict_pre_hook(_before_state_dict)
        module.register_load_state_dict_pre_hook(_before_state_dict)
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)


def _before_forward(plain: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():  # Dynamo captures the emptied model, and finds nothing here
        return
    first = next(plain.parameters(), None)
    found = sharding_of(first)
    # Code between graphs and methods of the model get weights when they use them.
    lends = found is not None and (found[0].engine.observed or found[0].engine.lends)
    if is_hollow(first) and not lends:
        raise StateError(
            f"this {type(plain).__name__} was given to fxshard.compile or fxshard.shard, which took its parameters: "
            "call the model that they returned"
        )


def _before_state_dict(plain: nn.Module, *args: Any) -> None:
    first = next(plain.parameters(), None)
    found = sharding_of(first)
    if found is not None and is_hollow(first) and not found[0].engine.lends:
        raise StateError(
            f"this {type(plain).__name__} was given to fxshard.compile or fxshard.shard, which took its parameters: "
            "take state_dict() (sharded) or full_state_dict() of the model that they returned, and load into that one"
        )


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if any(sharding_of(parameter) is not None for parameter in group["params"]):
            raise StateError(
                f"this {type(optimizer).__name__} was made before the model was sharded, or from the plain model that "
                "a wrapper keeps (Lightning's Fabric does), and would update parameters that are empty now: make it "
                "from model.parameters() of the model that fxshard.compile returned (with Fabric before setup()), "
                "or give optimizer=fxshard.AdamW(...) to fxshard.compile"
            )
