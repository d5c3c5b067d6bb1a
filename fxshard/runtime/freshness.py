"""Which shards an optimizer has just changed, so that what is gathered from them is gathered again.

A tensor's version counts in-place operations, but fused optimizer kernels do not count. torch's hook that runs after
every optimizer's step closes the gap, for ours and for any other. Ours gather what they changed themselves where a
forward would start with it, in the middle of the step: after the step, those shards have not changed any more. Where
quantized copies of a shard are kept, too, the engine counts the change before that gather, which makes them anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

_FLAT_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()
_hook: Any = None


def watch(parameter: torch.Tensor, flat: torch.Tensor, *, always: bool) -> None:
    """From now on an optimizer step over ``parameter`` counts as a change of ``flat``, the shard it is a view of."""
    global _hook
    _FLAT_OF[parameter] = (flat, always)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_count_changes)


def _count_changes(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    gathers_ahead = getattr(optimizer, "gathers_ahead", False)
    changed = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            flat, always = _FLAT_OF.get(parameter, (None, False))
            if flat is not None and (always or not gathers_ahead):
                changed[id(flat)] = flat
    if changed:
        torch.autograd.graph.increment_version(list(changed.values()))
