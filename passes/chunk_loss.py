"""Before autograd: a head and its cross-entropy become one operator over chunks of tokens, so that no logits exist.

Requires nothing. Provides ``fxshard::chunked_cross_entropy`` in the place of product, soft cap, cast, shift and loss
where ``return_logits=False`` asks for it, and a line in the report for each loss, chunked or not. Logits that the graph
returns are kept, unless that option is off: then the graph returns None for them.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxshard.kernels.loss_op import chunked_loss
from fxshard.passes.calls import call, place, rewrite_nested, shape, stand_in, value
from fxshard.passes.context import PassContext
from fxshard.passes.match_loss import HeadLoss, NoMatch, is_loss, match_loss, rows_call
from fxshard.planner.tuning import rows_of_a_chunk
from fxshard.schedule.loss_report import ChunkedLoss, FullLoss
from fxshard.schedule.params import PARAM
from fxshard.schedule.schedule import size


def chunk_loss(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return rewrite_nested(module, lambda graph: _rewrite(graph, context, nested=graph is not module.graph))


def _rewrite(graph: fx.Graph, context: PassContext, *, nested: bool) -> None:
    for node in [node for node in graph.nodes if is_loss(node)]:
        found = match_loss(node)
        if isinstance(found, NoMatch):
            context.loss.full.append(FullLoss(place(node), found.reason))
            continue
        where = place(found.product)
        if not nested and not context.options.return_logits and not context.ends_early:
            _return_none(graph, found)
        reason = _reason(found, context, nested)
        if reason is not None:
            context.loss.full.append(FullLoss(where, reason))
            continue
        product = value(found.product)
        assert product is not None
        rows = rows_of_a_chunk(found.classes, product.dtype.itemsize)
        context.loss.chunked.append(ChunkedLoss(where, rows, found.logits_bytes))
        _replace(graph, found, rows)


def _reason(found: HeadLoss, context: PassContext, nested: bool) -> str | None:
    """Why a loss that could be chunked is not."""
    wanted = context.options.debug.chunk_loss
    if wanted is False:
        return "Debug(chunk_loss=False)"
    if nested:
        return "it stands in a graph of its own, as a checkpointed region is, and would be computed again"
    if _quantized(found.weight, context):
        return "the head multiplies in MXFP8"
    if found.returned:
        return f"the logits ({size(found.logits_bytes)}) are returned; return_logits=False does without them"
    if wanted is None and context.options.return_logits:
        return f"return_logits=False would do without logits of {size(found.logits_bytes)}"
    return None


def _quantized(weight: fx.Node, context: PassContext) -> bool:
    """Whether a weight, or what it is a view of, is a parameter that rests in MXFP8."""
    waiting = [weight]
    while waiting:
        node = waiting.pop()
        ref = node.meta.get(PARAM)
        if ref is not None and context.bucket(ref).quantized:
            return True
        waiting.extend(node.all_input_nodes)
    return False


def _return_none(graph: fx.Graph, found: HeadLoss) -> None:
    """Take logits out of what the graph returns."""
    output = graph.output_node()
    output.args = fx.map_arg(output.args, lambda node: None if node in found.steps else node)


def _replace(graph: fx.Graph, found: HeadLoss, rows: int) -> None:
    loss = found.loss
    expected = value(loss)
    assert expected is not None
    with graph.inserting_before(loss):
        hidden = _chosen_rows(graph, found)
        weight = graph.call_method("t", (found.weight,)) if found.transposed else found.weight
        options = (expected.dtype, found.ignore_index, found.mean, found.cap, rows)
        new = graph.call_function(chunked_loss, (hidden, weight, found.bias, found.labels, *options))
        if weight is not found.weight:
            _note(weight, value(found.weight).t(), found.product)  # type: ignore[union-attr]
    _note(new, expected, loss)
    loss.replace_all_uses_with(new)
    for node in (loss, *reversed(found.steps)):
        graph.erase_node(node)


def _chosen_rows(graph: fx.Graph, found: HeadLoss) -> fx.Node:
    """The hidden states of the tokens that the loss gets logits of, in its order."""
    hidden = found.hidden
    for step in found.steps:
        if call(step) not in ("index", "reshape"):
            continue
        rearranged = rows_call(step, int(shape(hidden)[-1]))
        held, kept = value(hidden), value(step)
        assert rearranged is not None and held is not None and kept is not None
        with graph.inserting_before(found.loss):
            hidden = graph.create_node(rearranged.op, rearranged.target, (hidden, *rearranged.args))
        _note(hidden, held.new_empty((*kept.shape[:-1], held.shape[-1])), step)
    return hidden


def _note(node: fx.Node, result: Any, replaced: fx.Node) -> None:
    node.meta["example_value"] = result
    stand_in(node, replaced)
