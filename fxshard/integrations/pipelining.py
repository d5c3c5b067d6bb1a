"""``torch.distributed.pipelining``: a stage that reduces gradients once per step, over its data-parallel ranks.

from fxshard.integrations.pipelining import PipelineStage

model = fxshard.compile(stage_module, mesh=mesh["dp"], optimizer=fxshard.AdamW(lr=3e-4))
stage = PipelineStage(model, mesh["pp"].get_local_rank(), mesh["pp"].size(), device, group=mesh["pp"].get_group())
Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn).step(x)
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

from fxshard import ConfigError, ShardedModule


class PipelineStage(pipelining.PipelineStage):
    """torch's stage for a sharded module. Micro-batches but for the last of a step keep their gradients (``no_sync``).

    torch's own stage works, too: with it every micro-batch reduces its gradients, which then stay sharded. Schedules
    that compute gradients of inputs and of weights apart (zero bubble) get both at once, where the former are due.
    """

    submod: nn.Module

    def __init__(self, submodule: nn.Module, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("dw_builder") is not None:
            raise ConfigError("PipelineStage(dw_builder=...): a sharded module computes all gradients in one backward")
        plain = getattr(submodule, "_orig_mod", submodule)  # torch.compile(fxshard.shard(module), backend="fxshard")
        if not isinstance(plain, ShardedModule):
            raise ConfigError(
                f"PipelineStage of fxshard is for what fxshard.compile returns, and this is a {type(plain).__name__}: "
                "use torch.distributed.pipelining.PipelineStage for it"
            )
        super().__init__(submodule, *args, **kwargs)
        self._sharded = plain
        self._backwards = 0
        """Micro-batches whose gradients were computed in this step."""

    def clear_runtime_states(self) -> None:
        """A step begins."""
        super().clear_runtime_states()
        self._backwards = 0

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """One micro-batch. ``last_backward`` is not what counts: of split backwards it is said of weights."""
        if backward_type == "weight":
            return (), None  # they were computed with the gradients of inputs
        if backward_type == "input" and bwd_kwargs["output_grads"] is None:  # the loss, in a tuple
            bwd_kwargs = {**bwd_kwargs, "stage_output": bwd_kwargs["stage_output"][0]}
        self._backwards += 1
        with nullcontext() if self._backwards == self.chunks else self._sharded.no_sync():
            return super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward=last_backward)
