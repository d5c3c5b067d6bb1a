"""``save_pretrained`` of a sharded peft model: the adapter as peft writes it, and nothing of the base model."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxshard._torch.errors import CheckpointError, ConfigError
from fxshard.frontend.exporting import whole_tensors

if TYPE_CHECKING:
    from fxshard.frontend.module import ShardedModule


def has_adapter(plain: nn.Module) -> bool:
    """Whether a model is one of peft's."""
    return hasattr(plain, "peft_config") and hasattr(plain, "get_base_model")


def save_adapter(model: ShardedModule, save_directory: str | PathLike[str], **options: Any) -> None:
    """Write what trains, as ``PeftModel.from_pretrained`` reads it. Collective; the first rank writes.

    ``options``: those of peft's own ``save_pretrained``, but for ``state_dict``.
    """
    plain: Any = model._inner
    sharding = model._sharding
    trained = [bucket for bucket in sharding.buckets if bucket.plan.trainable]
    if not trained:
        raise ConfigError(
            "no parameter trains, so there is no adapter to save: set is_trainable=True when it is loaded"
        )
    names = {id(parameter) for bucket in trained for parameter in bucket.params}
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if id(value) in names}
    first = sharding.channels.shard == 0 and sharding.channels.replica == 0
    whole: dict[str, torch.Tensor] = {}
    for each, value in whole_tensors(state, trained):
        if first:
            whole.update(dict.fromkeys(each, value.to("cpu", copy=True)))
    failed = None
    if first:
        try:
            plain.save_pretrained(save_directory, state_dict=whole, **options)
        except Exception as error:  # the other ranks are told, and all raise the same
            failed = f"{type(error).__name__}: {error}"
    problem = next((each for each in sharding.agreement.share(failed) if each), None)
    if problem is not None:
        raise CheckpointError(f"{save_directory} was not saved: {problem}")
