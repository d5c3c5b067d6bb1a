"""A graph as text that a person can read and ``diff`` can compare: one line per node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxshard.schedule.events import event_of


def graph_text(module: fx.GraphModule) -> str:
    """Name, call, arguments; then what it gives and whether backward computes it again.

    For a runtime node: why it is there, and where its buffer lies.
    """
    return "\n".join(graph_lines(module)) + "\n"


def graph_lines(module: fx.GraphModule) -> list[str]:
    """The same, line by line: one per node."""
    return [_line(node) for node in module.graph.nodes]


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    remark = _remark(node)
    comment = f"    # {remark}" if remark else ""
    if node.op == "placeholder":
        return f"{node.name}: input{comment}"
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    arguments = [repr(arg) for arg in node.args] + [f"{key}={value!r}" for key, value in node.kwargs.items()]
    return f"{node.name} = {target.removesuffix('.default')}({', '.join(arguments)}){comment}"


def _remark(node: fx.Node) -> str:
    event = event_of(node)
    if event is not None:
        place = f", at byte {event.slot.offset} of the arena" if event.slot is not None else ""
        return f"{event.kind} {event.bucket}: {event.why}{place}"
    mark = node.meta.get("recompute")
    described = _described(node.meta.get("val", node.meta.get("example_value")))
    return ", ".join(filter(None, (described, getattr(mark, "name", ""))))


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return ", ".join(filter(None, map(_described, value)))
    return ""
