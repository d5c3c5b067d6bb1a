"""Compiling a deep model without tracing every layer through autograd.

AOTAutograd makes the joint graph of a model, and it makes what runs around the compiled graphs: it knows which inputs
want gradients and which outputs alias what. Repeated layers cost it time in both. So it is asked twice, each time about
a short graph:

1. The graph with four of the layers (:mod:`fxshard.repetition.shorten`) gives, expanded, the joint graph of the model.
2. The whole graph with one node, the *gap*, in place of all layers but the last has every input and every output of the
   model.
   What AOTAutograd learns from it about them is true of the model, and its joint graph gives way to that of 1.

Where one of the two says something the other does not, the answer is None or :class:`Unrepeatable`, and everything is
traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn

from fxshard import _compat
from fxshard.repetition.periods import Unrepeatable
from fxshard.repetition.shorten import shorten


@dataclass(frozen=True)
class Abridged:
    """A captured graph for AOTAutograd to look at, and the joint graph that it is to find."""

    graph: fx.GraphModule
    """All inputs, all outputs, and the gap."""
    joint: fx.GraphModule
    outputs: int
    """How many of the joint graph's outputs are forward's."""
    left_out: int
    """How many layers were not traced."""

    def adopt(self, traced: fx.GraphModule, outputs: int) -> fx.GraphModule:
        """The whole joint graph in place of the ``traced`` one of the graph with the gap."""
        ours, theirs = (module.graph.find_nodes(op="placeholder") for module in (self.joint, traced))
        alike = len(ours) == len(theirs) and all(map(_same_kind, ours, theirs))
        mine, other = (module.graph.output_node() for module in (self.joint, traced))
        results, found = mine.args[0], other.args[0]
        assert isinstance(results, Sequence) and isinstance(found, Sequence)
        alike = alike and outputs == self.outputs and len(results) == len(found)
        if not alike or not all(map(_same_kind, results[:outputs], found[:outputs])):
            raise Unrepeatable
        for node, other_node in [*zip(ours, theirs, strict=True), (mine, other)]:
            if "desc" in other_node.meta:  # torch describes inputs and outputs, each by its name in the model
                node.meta["desc"] = other_node.meta["desc"]
        return self.joint


def abridge(
    graph: fx.GraphModule,
    names: Sequence[str | None],
    example_inputs: Sequence[Any],
    decompositions: Mapping[Any, Any] | None,
    rewrite: Callable[[fx.GraphModule], fx.GraphModule],
) -> Abridged | None:
    """Make the joint graph of a captured graph from four of its layers; None where its layers do not repeat.

    ``names`` are those of the inputs that are parameters or buffers. Sizes must be known. ``rewrite`` is what happens
    to a joint graph next: it happens to that of four layers, unless it would number their random numbers.
    """
    if any(_compat.free_symbols(node.meta.get("example_value")) for node in graph.graph.find_nodes(op="placeholder")):
        return None
    short = shorten(graph, names)
    gapped = _with_gap(graph, short.gap) if short is not None else None
    if short is None or gapped is None:
        return None
    try:
        joint, outputs = _joint_of(short.graph, [example_inputs[i] for i in short.kept], decompositions)
        returned = graph.graph.output_node().args[0]
        if not isinstance(returned, Sequence) or outputs != len(returned) or _writes_to_inputs(joint):
            return None  # what layers do to their inputs would have to be told of all of them
        random = _compat.draws_random_numbers(joint.graph)
        whole = rewrite(short.expand(joint)) if random else short.expand(rewrite(joint))
        return Abridged(gapped, whole, outputs, short.removed)
    except Unrepeatable:
        return None


class _Traced(BaseException):
    """Thrown where AOTAutograd hands over the joint graph; the rest of what it does is not wanted."""

    def __init__(self, joint: fx.GraphModule, outputs: int) -> None:
        self.joint, self.outputs = joint, outputs


def _joint_of(
    graph: fx.GraphModule, inputs: Sequence[Any], decompositions: Mapping[Any, Any] | None
) -> tuple[fx.GraphModule, int]:
    """Forward and backward in one graph, and the number of its outputs that are forward's."""

    def partition(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **kwargs: Any) -> NoReturn:
        raise _Traced(joint, num_fwd_outputs)

    def without_backward(graph: fx.GraphModule, _: Any) -> NoReturn:
        raise Unrepeatable

    try:
        _compat.aot_autograd(
            fw_compiler=without_backward,
            inference_compiler=without_backward,
            partition_fn=partition,
            decompositions=decompositions,
        )(graph, inputs)
    except _Traced as traced:
        return traced.joint, traced.outputs
    raise AssertionError("AOTAutograd neither partitioned the graph nor compiled it")


def _writes_to_inputs(joint: fx.GraphModule) -> bool:
    copies = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return any(isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder" for node in copies)


def _same_kind(a: Any, b: Any) -> bool:
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return a is None and b is None
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y)
    return (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


# -- the gap -----------------------------------------------------------------------------------------------------------


def _with_gap(module: fx.GraphModule, gap: range) -> fx.GraphModule | None:
    """The graph with one node in place of those at the positions ``gap``; None if other than new tensors leave it."""
    nodes = list(module.graph.nodes)
    left_out = {nodes[position]: None for position in gap}
    given = dict.fromkeys(ref for node in left_out for ref in node.all_input_nodes if ref not in left_out)
    leaving = [node for node in left_out if any(user not in left_out for user in node.users)]
    values = [node.meta.get("example_value") for node in leaving]
    if not all(isinstance(value, torch.Tensor) for value in values) or not _all_new(values, given):
        return None
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    root = nn.Module()
    for name in {str(node.target).partition(".")[0] for node in nodes if node.op in ("get_attr", "call_module")}:
        setattr(root, name, getattr(module, name))
    root.fxshard_gap = _Gap(values)
    for position, node in enumerate(nodes):
        if position == gap.start:
            call = graph.call_module("fxshard_gap", tuple(env[ref] for ref in given))
            for i, result in enumerate(leaving):
                env[result] = graph.call_function(operator.getitem, (call, i))
                env[result].meta.update(result.meta)
        if node not in left_out:
            env[node] = graph.node_copy(node, env.__getitem__)
    gapped = fx.GraphModule(root, graph)
    gapped.meta.update(module.meta)
    return gapped


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
        return _Jump.apply(self._made, self._differentiable, *args)


class _Jump(torch.autograd.Function):
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
