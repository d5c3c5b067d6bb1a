"""A collective of the model's own, or the wait for it, as an instruction: torch's operator, called between segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def collective(node: fx.Node) -> Callable[[list[Any]], tuple[Any]]:
    """Calls the operator of a node with the values of ``node.all_input_nodes``, and gives its one result."""
    call, args, kwargs = node.target, node.args, node.kwargs
    assert callable(call)
    inputs = node.all_input_nodes

    def run(values: list[Any]) -> tuple[Any]:
        given = dict(zip(inputs, values, strict=True))
        values.clear()
        return (call(*fx.map_arg(args, given.__getitem__), **fx.map_arg(kwargs, given.__getitem__)),)

    return run
