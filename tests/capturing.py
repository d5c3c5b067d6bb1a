"""Graphs as Dynamo captures them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


def captured(run: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The one graph of a function that is called with ``args``."""
    found: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(run, backend=keep, fullgraph=True)(*args)
    return found[0]
