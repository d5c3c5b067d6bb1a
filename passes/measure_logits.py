"""Before autograd: the largest logit of each head of attention is computed and returned, for an optimizer that clips.

Requires attention as ``scaled_dot_product_attention`` or ``fxshard::window_attention``, after ``recognize_masks``.
Provides, where gradients are computed and the optimizer has ``qk_clip``, one more result of the captured graph: a
number for each head of each attention, in order; and in ``context.heads``, which rows of which weights these heads are
made of. An attention whose logits do not shrink with its projections is an error: clipping would not bound them.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from fxshard._torch import private
from fxshard._torch.errors import CaptureError
from fxshard.kernels.logits_op import push_largest_logits
from fxshard.kernels.window_op import UNLIMITED, window_attention
from fxshard.passes.calls import TRANSFORMED, argument, place, rewrite_nested, shape, value
from fxshard.passes.context import PassContext
from fxshard.passes.find_projection import NotLinear, find_projection
from fxshard.planner.head_rows import AttentionHeads


def measure_logits(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    results = map(value, module.graph.output_node().all_input_nodes)
    trains = any(result is not None and result.requires_grad for result in results)
    if not context.measures_logits or not trains:
        return module
    _Tally(module, context).thread()
    return rewrite_nested(module, lambda graph: None)


class _Call(NamedTuple):
    """What attention is computed of."""

    query: fx.Node
    key: fx.Node
    mask: fx.Node | None
    bounds: fx.Node | None
    window: int
    ahead: int
    scale: float


class _Tally:
    """One tensor that passes through all attentions of a graph, and through its checkpointed regions."""

    def __init__(self, module: fx.GraphModule, context: PassContext) -> None:
        self._module, self._context = module, context
        self._given: dict[fx.Node, fx.Node] = {}
        """Input of a checkpointed region → what it is given."""
        found = [node for part in _parts(module) for node in part.graph.nodes if _is_attention(node)]
        self._found = [node for node in found if (query := value(node.args[0])) is not None and query.requires_grad]
        if not self._found or any(_is_flex(node) for part in _parts(module) for node in part.graph.nodes):
            raise CaptureError(
                "qk_clip: attention that can be measured is a call of F.scaled_dot_product_attention, and the model "
                "has none, or another one besides: load it so that it calls that function (in transformers "
                'attn_implementation="sdpa"), or leave out qk_clip'
            )
        heads = [shape(node.args[0])[1] for node in self._found]
        query = value(self._found[0].args[0])
        assert query is not None
        self._size, self._device = sum(heads), query.device
        with private.as_fake_as(query):
            self._example = torch.empty(self._size, device=query.device)

    def thread(self) -> None:
        graph = self._module.graph
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            start = graph.call_function(torch.full, ((self._size,), -math.inf), {"device": self._device})
        start.meta["example_value"] = self._example
        last = self._through(self._module, start)
        if len(self._context.heads) != len(self._found):
            raise CaptureError(
                "qk_clip: attention in a branch or a loop of the graph, or in a checkpointed region that runs twice, "
                "is not measured: leave out qk_clip for this model"
            )
        end = graph.output_node()
        end.args = ((*end.args[0], last),)  # type: ignore[misc]

    def _through(self, part: fx.GraphModule, tally: fx.Node) -> fx.Node:
        for node in list(part.graph.nodes):
            if node in self._found:
                tally = self._measure(node, tally)
            elif private.calls_checkpointed(node):
                tally = self._checkpointed(part, node, tally)
        return tally

    def _checkpointed(self, part: fx.GraphModule, call: fx.Node, tally: fx.Node) -> fx.Node:
        region = getattr(part, str(call.args[0].target))  # type: ignore[union-attr]
        if not any(each.graph is inner.graph for inner in _parts(region) for each in self._found):
            return tally
        inputs = region.graph.find_nodes(op="placeholder")
        self._given.update(zip(inputs, call.args[1:], strict=True))  # type: ignore[arg-type]
        with region.graph.inserting_after(inputs[-1]):
            own = region.graph.placeholder("tally")
        own.meta["example_value"] = self._example
        last, end = self._through(region, own), region.graph.output_node()
        results = end.args[0]
        assert isinstance(results, tuple | list)
        end.args = ((*results, last),)
        call.args = (*call.args, tally)
        call.meta["example_value"] = (*call.meta["example_value"], self._example)
        with part.graph.inserting_after(call):
            after = part.graph.call_function(operator.getitem, (call, len(results)))
        after.meta["example_value"] = self._example
        return after

    def _measure(self, node: fx.Node, tally: fx.Node) -> fx.Node:
        call, where = _operands(node), place(node)
        width, heads = shape(call.query)[-1], shape(call.query)[1]
        try:
            query, key = (find_projection(each, width, self._given, self._context) for each in (call.query, call.key))
        except NotLinear as reason:
            raise CaptureError(
                f"qk_clip: the logits of the attention at {where} cannot be bounded by scaling the weights of its "
                f"queries and keys: {reason}. Leave out qk_clip for this model; queries and keys that are normalized "
                "have bounded logits without it"
            ) from None
        if query.heads != heads or heads % key.heads:
            raise CaptureError(
                f"qk_clip: the attention at {where} has {heads} heads, but the weights that make its queries have "
                f"{query.heads} and those of its keys {key.heads}: leave out qk_clip for this model"
            )
        self._context.heads.append(AttentionHeads(where, query, key))
        graph = node.graph
        with graph.inserting_before(node):
            operands = [graph.call_method("detach", (each,)) for each in (call.query, call.key)]
            for operand, source in zip(operands, call, strict=False):
                held = value(source)
                assert held is not None
                with private.as_fake_as(held):
                    operand.meta["example_value"] = held.detach()
            made = graph.call_function(push_largest_logits, (tally, *operands, *call[2:]))
        made.meta["example_value"] = self._example
        return made


def _operands(node: fx.Node) -> _Call:
    query, key = node.args[:2]
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
    if node.target is window_attention:
        _, _, _, bounds, key_mask, window, ahead, scale = node.args
        return _Call(query, key, key_mask, bounds, window, ahead, scale)  # type: ignore[arg-type]
    mask, scale = argument(node, 3, "attn_mask"), argument(node, 6, "scale")
    scale = 1 / math.sqrt(shape(query)[-1]) if scale is None else scale
    plain = all(private.is_plain(value(each)) for each in (query, key)) and not node.meta.get(TRANSFORMED)
    if not plain or len(shape(query)) != 4 or not isinstance(scale, float) or scale <= 0:
        raise CaptureError(
            f"qk_clip: the attention at {place(node)} is not measured: queries of shape {[*shape(query)]} times "
            f"{scale}, where plain tensors [batch, heads, length, width] times a positive number were expected"
        )
    ahead = 0 if argument(node, 5, "is_causal", False) else UNLIMITED
    return _Call(query, key, mask, None, UNLIMITED, ahead, scale)


def _parts(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [part for part in module.modules() if isinstance(part, fx.GraphModule)]


def _is_attention(node: fx.Node) -> bool:
    named = node.op == "call_function" and node.target in (F.scaled_dot_product_attention, window_attention)
    return named and len(node.args) > 1


def _is_flex(node: Any) -> bool:
    return getattr(node.target, "__name__", "") == "flex_attention"
