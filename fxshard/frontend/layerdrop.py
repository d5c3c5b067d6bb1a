"""LayerDrop that is switched off does not break the graph.

Stacks with LayerDrop (OPT, BART, Whisper and some forty others in ``transformers``) draw a number for each layer while
they train, and leave the layer out where it is below a rate. They draw it at a rate of zero, too, which is the default:

    dropout_probability = torch.rand([])
    if dropout_probability < self.layerdrop:
        continue

Dynamo cannot follow a branch on a number that is drawn. But none is below zero, so here the comparison is ``False``
itself, which Dynamo can follow. A rate above zero is compared as written, and breaks the graph as before. On torch 2.11
every rate does: Dynamo does not take ``torch.rand`` through a mode there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class NoneBelowZero(TorchFunctionMode):
    """Knows that no number drawn by ``torch.rand`` is below zero. Dynamo traces it with the model it is around."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: torch.Tensor | None = None
        """What the call before this one drew; anything may have happened to what was drawn before that."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (func is torch.Tensor.lt or func is torch.Tensor.__lt__) and self._is_never(args[0], args[1]):
            return False
        result = func(*args, **(kwargs or {}))
        self.drawn = result if func is torch.rand else None
        return result

    def _is_never(self, number: Any, rate: Any) -> bool:
        """Whether a single number that was just drawn is compared with a rate that none is below."""
        drawn = self.drawn
        if drawn is None or number is not drawn or drawn.dim() > 0:
            return False
        return isinstance(rate, (int, float)) and rate <= 0


def has_layerdrop(model: nn.Module) -> bool:
    """Whether some module, or its configuration, has a rate of LayerDrop: only then the mode is worth its while.

    Dynamo takes every torch function of the model through a mode.
    """
    return any(
        "layerdrop" in name
        for module in model.modules()
        for holder in (module, getattr(module, "config", None))
        for name in getattr(holder, "__dict__", ())
    )
