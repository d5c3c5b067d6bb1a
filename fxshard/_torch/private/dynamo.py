"""What Dynamo knows while it hands a captured graph to a backend."""

from __future__ import annotations

from typing import Any

from torch import fx


def graph_break(graph: fx.GraphModule) -> str | None:
    """Where and why Dynamo ended a graph early, None where it captured to the end. torch 2.11, 2.13."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    where = [f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack]
    return f"{where[-1] if where else 'unknown code'}: {reason.reason.splitlines()[0]}"


def graph_input_example(placeholder: fx.Node) -> Any:
    """The real value of an input of a Dynamo graph: for a parameter, the parameter itself. torch 2.11, 2.13."""
    argument = placeholder.meta.get("grapharg")
    return argument.example if argument is not None else None
