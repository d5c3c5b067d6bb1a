"""A captured graph with one node in place of all that it computes.

AOTAutograd makes what runs around compiled graphs: it knows which inputs want gradients and which outputs alias what.
It learns that from a captured graph, and needs to see of it no more than its inputs and its outputs, where what lies
between has been differentiated already.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxshard import _compat


def everything(module: fx.GraphModule) -> fx.GraphModule | None:
    """The graph with one node between inputs and outputs; None if other than new tensors come out of it.

    What comes out as a view of something new is made of it behind the node, or AOTAutograd would take it for new.
    """
    end = module.graph.output_node()
    inside = {node for node in module.graph.nodes if node.op not in ("placeholder", "output")}
    given = dict.fromkeys(ref for node in module.graph.nodes if node in inside for ref in node.all_input_nodes)
    given = {ref: None for ref in given if ref not in inside}
    behind = {node for node in _sources(end, lambda node: not _is_new(node)) if node in inside and not _is_new(node)}
    leaving = [
        node
        for node in module.graph.nodes
        if node in inside and node not in behind and any(user is end or user in behind for user in node.users)
    ]
    values = [node.meta.get("example_value") for node in leaving]
    if not all(isinstance(value, torch.Tensor) for value in values) or not _all_new(values, given):
        return None
    if any(node.op in ("get_attr", "call_module") for node in behind):
        return None
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        env[node] = graph.node_copy(node)
    call = graph.call_module("fxshard_gap", tuple(env[ref] for ref in given))
    for i, result in enumerate(leaving):
        env[result] = graph.call_function(operator.getitem, (call, i))
        env[result].meta.update(result.meta)
    for node in module.graph.nodes:
        if node in behind or node is end:
            env[node] = graph.node_copy(node, env.__getitem__)
    root = nn.Module()
    root.fxshard_gap = _Gap(values)
    gapped = fx.GraphModule(root, graph)
    gapped.meta.update(module.meta)
    return gapped


def _sources(node: fx.Node, through: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The nodes that ``node`` is made of, up to those that ``through`` does not hold for."""
    found: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source not in found:
            found.add(source)
            stack += source.all_input_nodes if through(source) else []
    return found


def _is_new(node: fx.Node) -> bool:
    """Whether a node's value is a tensor with memory of its own."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not value._is_view()


def _all_new(values: list[Any], given: Mapping[fx.Node, None]) -> bool:
    """Whether no two of the tensors, nor one of them and something given, share memory."""
    before = [node.meta.get("example_value") for node in given]
    storages = [_compat.memory_of(value) for value in [*values, *before] if isinstance(value, torch.Tensor)]
    own = storages[: len(values)]
    return len(set(own)) == len(own) and not set(own) & set(storages[len(values) :])


class _Gap(nn.Module):
    """Returns tensors like those that the layers in its place return, and has gradients for all it is given."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._made = [(value.shape, value.stride(), value.dtype, value.device) for value in like]
        self._differentiable = [value.requires_grad for value in like]

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return Jump.apply(self._made, self._differentiable, *args)


class Jump(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: list[Any], differentiable: list[bool], *args: Any) -> tuple[torch.Tensor, ...]:
        ctx.kinds = [
            (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else None for value in args
        ]
        results = tuple(
            torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, device in made
        )
        constant = [result for result, wanted in zip(results, differentiable, strict=True) if not wanted]
        ctx.mark_non_differentiable(*constant)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wanted = [kind if needed else None for kind, needed in zip(ctx.kinds, ctx.needs_input_grad[2:], strict=True)]
        # One for all of a kind: nobody looks at them, and tracing one for each parameter takes its time.
        made = {
            kind: torch.empty(kind[0], dtype=kind[1], device=kind[2])
            for kind in dict.fromkeys(wanted)
            if kind is not None
        }
        return None, None, *(made[kind] if kind is not None else None for kind in wanted)
