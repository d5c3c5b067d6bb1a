"""Backward: gradients go into one bucket per unit, which is reduced as soon as its last contribution is written.

Requires the gradient outputs tied to parameters. Provides, per trainable bucket, ``grad`` (take a gradient bucket) at
the last cut before the first contribution, an in-place write per parameter right after its producer, ``reduce`` at the
first cut after the last write, and ``finish``. At most two gradient buckets are alive: the one being filled and the
one being reduced. The graph returns ``None`` for these parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx

from fxshard.passes.context import PassContext
from fxshard.passes.cuts import CutPoints
from fxshard.passes.gradient_sources import gradient_sources
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.tuning import GRADIENT_BUCKETS
from fxshard.schedule.events import Kind, Phase, insert
from fxshard.schedule.params import GRADS, ParamRef

Empty = Callable[[torch.Tensor, tuple[int, ...], torch.dtype], torch.Tensor]


def insert_reduce_scatter(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    cuts = CutPoints(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    output = graph.output_node()
    contributions = _contributions(output, context)
    sources = gradient_sources(graph, [node for writes in contributions.values() for node in writes.values()])
    in_order = sorted(contributions, key=lambda index: max(order[node] for node in contributions[index].values()))

    empty = _memo()
    reduced_at: list[fx.Node] = []  # the cuts before which the buckets so far are reduced
    taken_at: list[fx.Node] = []
    for k, index in enumerate(in_order):
        bucket, writes = context.buckets[index], contributions[index]
        first = min(writes.values(), key=order.__getitem__)
        last = max(writes.values(), key=order.__getitem__)
        take_at = output if first.op == "placeholder" else cuts.at_or_before(first)
        if taken_at:
            # Taken in the order in which they are reduced: one that is complete later must not hold up the one before.
            take_at = max(take_at, taken_at[-1], key=order.__getitem__)
        if k >= GRADIENT_BUCKETS:
            # A bucket that fills slowly is taken late, so that the one before the previous is always done by then.
            take_at = max(take_at, reduced_at[k - GRADIENT_BUCKETS], key=order.__getitem__)
            with graph.inserting_before(take_at):
                _finish(graph, in_order[k - GRADIENT_BUCKETS], context, why=f"makes room for {bucket.name}")
        taken_at.append(take_at)
        with graph.inserting_before(take_at):
            why = f"first gradient: {_param(bucket, writes, first)}"
            views = _take(graph, index, writes, sources, context, why, empty)
        for position, gradient in writes.items():
            late = gradient.op == "placeholder" or order[gradient] < order[take_at]
            _write(graph, views, position, gradient, after=views if late else gradient)
        reduce_at = output if last.op == "placeholder" else cuts.after(last)
        reduce_at = max(reduce_at, take_at, key=order.__getitem__)
        with graph.inserting_before(reduce_at):
            why = f"complete with {_param(bucket, writes, last)}"
            insert(graph, Kind.REDUCE, bucket, phase=Phase.BACKWARD, group=context.group, why=why)
        reduced_at.append(reduce_at)

    with graph.inserting_before(output):
        for index in in_order[-GRADIENT_BUCKETS:]:
            _finish(graph, index, context, why="end of backward")
    output.args = (tuple(None if ref is not None else arg for ref, arg in _outputs(output)),)
    return module


def _param(bucket: BucketPlan, writes: dict[int, fx.Node], gradient: fx.Node) -> str:
    return bucket.params[next(position for position, node in writes.items() if node is gradient)]


def _outputs(output: fx.Node) -> list[tuple[ParamRef | None, fx.Node | None]]:
    args = output.args[0]
    assert isinstance(args, (tuple, list))
    refs = output.meta.get(GRADS, ())
    return [(refs[i] if i < len(refs) else None, arg) for i, arg in enumerate(args)]  # type: ignore[misc]


def _contributions(output: fx.Node, context: PassContext) -> dict[int, dict[int, fx.Node]]:
    """{bucket: {position in it: the node that is its gradient}}"""
    found: dict[int, dict[int, fx.Node]] = {}
    for ref, gradient in _outputs(output):
        if ref is not None and gradient is not None and context.bucket(ref).trainable:
            found.setdefault(ref.bucket, {})[ref.position] = gradient
    return found


def _memo() -> Empty:
    """Empty tensors by shape and dtype: layers are alike, and each fake tensor takes as long as an operator."""
    made: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def empty(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if (shape, dtype) not in made:
            made[shape, dtype] = like.new_empty(shape, dtype=dtype)
        return made[shape, dtype]

    return empty


def _take(
    graph: fx.Graph,
    index: int,
    writes: dict[int, fx.Node],
    sources: Mapping[fx.Node, tuple[int, ...]],
    context: PassContext,
    why: str,
    empty: Empty,
) -> fx.Node:
    bucket = context.buckets[index]
    untouched = tuple(i for i in range(len(bucket.params)) if i not in writes)
    needs = tuple((position, sources[node]) for position, node in sorted(writes.items()) if node in sources)
    args = {name: value for name, value in (("zeros", untouched), ("needs", needs)) if value}
    node = insert(graph, Kind.GRAD, bucket, phase=Phase.BACKWARD, group=context.group, why=why, **args)
    some = next(iter(writes.values())).meta["val"]
    node.meta["val"] = tuple(empty(some, slot.spec.shape, bucket.reduce_dtype) for slot in bucket.layout.slots)
    return node


def _write(graph: fx.Graph, views: fx.Node, position: int, gradient: fx.Node, after: fx.Node) -> None:
    """Copy (and cast) the gradient into its place; the compiler fuses this with what produces it where it can."""
    while after.next.op == "call_function" and after.next.target is operator.getitem:
        after = after.next
    with graph.inserting_after(after):
        view = graph.call_function(operator.getitem, (views, position))
    view.meta["val"] = views.meta["val"][position]
    with graph.inserting_after(view):
        copy = graph.call_function(torch.ops.aten.copy_.default, (view, gradient))
    copy.meta["val"] = view.meta["val"]


def _finish(graph: fx.Graph, index: int, context: PassContext, why: str) -> None:
    insert(graph, Kind.FINISH, context.buckets[index], phase=Phase.BACKWARD, group=context.group, why=why)
