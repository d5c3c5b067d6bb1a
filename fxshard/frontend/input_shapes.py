"""The shapes that a captured graph takes, in a line that a person reads."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import fx

_ARGUMENT = re.compile(r"[lL]_(?:kw)?args_(\w+?)_?$")
"""What Dynamo calls an input that is an argument of ``forward``: by its position, or by its keyword."""


def taken_shapes(inputs: Sequence[fx.Node]) -> str:
    """The arguments among the inputs of Dynamo's graph, ``any`` where a size was left open."""
    mode = "training" if torch.is_grad_enabled() else "evaluation"
    arguments = [(found[1], node.meta.get("example_value")) for node in inputs if (found := _ARGUMENT.match(node.name))]
    shapes = [f"{name} {_shape(value)}" for name, value in arguments if isinstance(value, torch.Tensor)]
    return f"{', '.join(shapes) or 'values of an earlier graph'} ({mode})"


def _shape(value: torch.Tensor) -> str:
    sizes = ["any" if _is_open(size) else str(size) for size in value.shape]
    return f"[{', '.join(sizes)}]"


def _is_open(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and not str(size).isdigit()  # one that a guard closed prints as its value
