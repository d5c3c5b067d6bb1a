"""A graph as text that a person can read and ``diff`` can compare: one line per node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxshard.events import event_of


def graph_text(module: fx.GraphModule) -> str:
    """Name, call, arguments; behind it what it gives, or for a runtime node why it is there."""
    return "\n".join(_line(node) for node in module.graph.nodes) + "\n"


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    remark = _remark(node)
    behind = f"    # {remark}" if remark else ""
    if node.op == "placeholder":
        return f"{node.name}: input{behind}"
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    arguments = [repr(arg) for arg in node.args] + [f"{key}={value!r}" for key, value in node.kwargs.items()]
    return f"{node.name} = {target.removesuffix('.default')}({', '.join(arguments)}){behind}"


def _remark(node: fx.Node) -> str:
    event = event_of(node)
    if event is not None:
        return f"{event.kind} {event.bucket}: {event.why}"
    return _described(node.meta.get("val", node.meta.get("example_value")))


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return ", ".join(filter(None, map(_described, value)))
    return ""
