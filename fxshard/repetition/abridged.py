"""Compiling a deep model without tracing every layer through autograd.

AOTAutograd makes the joint graph of the captured graph with four of the layers (:mod:`fxshard.repetition.shorten`),
which tells that of the model. Where it cannot be told the answer is None, and everything is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import fx

from fxshard import _compat
from fxshard.repetition.expansion import Shortened
from fxshard.repetition.periods import Unrepeatable
from fxshard.repetition.shorten import shorten

T = TypeVar("T")


@dataclass(frozen=True)
class Abridged:
    """The joint graph of a captured graph whose layers were not all traced."""

    joint: fx.GraphModule
    outputs: int
    """How many of the joint graph's outputs are forward's."""
    static: tuple[int, ...]
    """Positions of the inputs that have the same memory at every call."""
    left_out: int
    """How many layers were not traced."""
    short: Shortened | None
    """What puts layers back that the joint graph does not have; None if it has all."""


def abridge(
    graph: fx.GraphModule,
    names: Sequence[str | None],
    example_inputs: Sequence[Any],
    decompositions: Mapping[Any, Any] | None,
    rewrite: Callable[[fx.GraphModule], fx.GraphModule],
    then: Callable[[Abridged], T],
) -> T | None:
    """Make the joint graph of four layers of a captured graph, and call ``then`` with it, as a partitioner is called by
    AOTAutograd; None where layers do not repeat.

    ``names`` are those of the inputs that are parameters or buffers. Sizes must be known. ``rewrite`` is what happens
    to a joint graph next: it happens to that of four layers, unless it would number their random numbers.
    """
    if any(_compat.free_symbols(node.meta.get("example_value")) for node in graph.graph.find_nodes(op="placeholder")):
        return None
    short = shorten(graph, names)
    if short is None:
        return None
    returned = graph.graph.output_node().args[0]

    def found(joint: fx.GraphModule, outputs: int, static: Sequence[int]) -> T:
        if not isinstance(returned, Sequence) or outputs != len(returned) or _writes_to_inputs(joint):
            raise Unrepeatable  # what layers do to their inputs would have to be told of all of them
        stays = _static_inputs(short, static)
        if _compat.draws_random_numbers(joint.graph):
            return then(Abridged(rewrite(short.expand(joint)), outputs, stays, short.removed, None))
        return then(Abridged(rewrite(joint), outputs, stays, short.removed, short))

    try:
        return _with_joint(short.graph, [example_inputs[i] for i in short.kept], decompositions, found)
    except Unrepeatable:
        return None


def _static_inputs(short: Shortened, static: Sequence[int]) -> tuple[int, ...]:
    """What is said of the inputs that are left, said of all: layers are like the second."""
    kept = {short.kept[position] for position in static}
    like = {member: i for i, member in enumerate(short.members) if member is not None}
    return tuple(
        i
        for i, member in enumerate(short.members)
        if i in kept or (i not in short.kept and member is not None and like[1, member[1]] in kept)
    )


class _Done(BaseException):
    """Thrown when the joint graph has been dealt with; the rest of what AOTAutograd does is not wanted."""

    def __init__(self, result: Any) -> None:
        self.result = result


def _with_joint(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    decompositions: Mapping[Any, Any] | None,
    found: Callable[[fx.GraphModule, int, Sequence[int]], T],
) -> T:
    """What ``found`` returns for forward and backward in one graph, the number of its outputs that are forward's, and
    the positions of inputs that stay in place.
    """

    def partition(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **kwargs: Any) -> NoReturn:
        raise _Done(found(joint, num_fwd_outputs, kwargs.get("static_lifetime_input_indices") or ()))

    def without_backward(graph: fx.GraphModule, _: Any) -> NoReturn:
        raise Unrepeatable

    try:
        _compat.aot_autograd(
            fw_compiler=without_backward,
            inference_compiler=without_backward,
            partition_fn=partition,
            decompositions=decompositions,
        )(graph, inputs)
    except _Done as done:
        return done.result  # type: ignore[no-any-return]
    raise AssertionError("AOTAutograd neither partitioned the graph nor compiled it")


def _writes_to_inputs(joint: fx.GraphModule) -> bool:
    copies = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return any(isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder" for node in copies)
