"""Before autograd: grouped GEMM → gated activation (× routing weight) → grouped GEMM becomes one operator.

Requires grouped products that can be differentiated (``group_experts``). Provides ``fxshard::grouped_swiglu`` in the
place of each match, with the implementation that ``choose`` picks for the machine, and a line in the report for each
match and each near miss. Where the implementation asks for a multiple of tokens per expert, tokens and routing weights
are padded before the operator and the result is unpadded after it. A routing weight after the second product
moves before it: ``(h · W) p`` is ``(p h) · W``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from fxshard.kernels.case import Case
from fxshard.kernels.choose import choose, implementation
from fxshard.kernels.op import grouped_swiglu
from fxshard.kernels.padding import pad_groups, take_rows
from fxshard.kernels.report import Fused, Left
from fxshard.passes.calls import (
    call,
    cast_from,
    changed_between,
    grouped_product,
    grouped_products,
    place,
    rewrite_nested,
    same_dtype,
    shape,
    stand_in,
    value,
    writes,
)
from fxshard.passes.context import PassContext
from fxshard.passes.expert_bias import added_bias
from fxshard.passes.match_glu import GatedMlp, Miss, match_gated_mlp


def fuse_grouped_swiglu(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return rewrite_nested(module, lambda graph: _fuse(graph, context))


def _fuse(graph: fx.Graph, context: PassContext) -> None:
    misses: dict[fx.Node, str] = {}
    for down in list(grouped_products(graph)):
        try:
            mlp = match_gated_mlp(down, grouped_product)
            tail = _tail(mlp)
            _check_unchanged(mlp, tail)
        except Miss as miss:
            misses[down.node] = str(miss)
            continue
        misses = {node: why for node, why in misses.items() if node not in mlp.inside}
        context.experts.fused.append(_replace(graph, mlp, tail, context))
    # One line per place: a first product is a near miss too, but it is the second that says what is missing.
    reasons = {place(node): why for node, why in misses.items()}
    context.experts.left.extend(Left(where, why) for where, why in reasons.items())


@dataclass
class _Tail:
    """What follows the second product and belongs to it: the nodes; the operator replaces the last of them."""

    last: fx.Node
    nodes: list[fx.Node]
    bias: fx.Node | None = None
    routing: fx.Node | None = None
    remark: str = ""


def _tail(mlp: GatedMlp) -> _Tail:
    down = mlp.down.node
    tail = _Tail(down, [])
    bias = added_bias(next((user for user in down.users if call(user) == "add"), None), grouped_product)
    if bias is not None and bias.product is down and _only_reader(down, bias.node) and same_dtype(bias.node, down):
        tail.bias = bias.values
        tail.nodes.append(bias.node)
        # Added in place, later readers name the product itself.
        tail.last = bias.node if writes(bias.node) is not down or len(down.users) == 1 else down
    if mlp.routing is None:
        _take_routing(tail)
    return tail


def _only_reader(product: fx.Node, adding: fx.Node) -> bool:
    """Whether nothing reads the product without its bias."""
    others = [user for user in product.users if user is not adding]
    if not others:
        return True
    return writes(adding) is product and not adding.users and all(adding < user for user in others)


def _take_routing(tail: _Tail) -> None:
    readers = [user for user in tail.last.users if user not in tail.nodes]
    if len(readers) != 1 or call(readers[0]) != "mul":
        return
    (scaling,) = readers
    factors = [arg for arg in scaling.args[:2] if arg is not tail.last]
    full = shape(tail.last)
    if len(factors) != 1 or not isinstance(factors[0], fx.Node) or shape(factors[0]) != (full[0], 1) or full[1] == 1:
        return
    if not same_dtype(tail.last, scaling):
        tail.remark = ", routing weight outside (it widens the result's type)"
        return
    tail.routing = factors[0]
    tail.nodes.append(scaling)
    tail.last = scaling


def _check_unchanged(mlp: GatedMlp, tail: _Tail) -> None:
    """The operator reads its inputs where its last node stood: nothing may have changed them by then."""
    inputs = _inputs(mlp, tail)
    for node in inputs:
        if node in mlp.inside:
            raise Miss(f"{node.name} depends on what lies between the products")
    begin = min(mlp.inside)
    changed = changed_between(inputs, begin, _end(mlp, tail))
    if changed is None and mlp.routing is not None:  # which may be read before it is cast
        casts = [user for user in mlp.routing.users if cast_from(user) is not None]
        changed = changed_between([mlp.routing], min([begin, *casts]), begin)
    if changed is not None:
        raise Miss(f"{changed.name} is changed in place before the experts are done")


def _end(mlp: GatedMlp, tail: _Tail) -> fx.Node:
    return max([mlp.down.node, *tail.nodes])


def _inputs(mlp: GatedMlp, tail: _Tail) -> list[fx.Node]:
    found = (mlp.x, mlp.down.offsets, mlp.gate.weight, mlp.up_weight, mlp.down.weight, mlp.gate_bias, mlp.up_bias)
    return [node for node in (*found, tail.bias, mlp.routing or tail.routing) if node is not None]


def _replace(graph: fx.Graph, mlp: GatedMlp, tail: _Tail, context: PassContext) -> Fused:
    choice = choose(context.options.experts, _case(mlp, tail))
    name = choice.name
    routing = mlp.routing or tail.routing
    glu = mlp.glu
    mark = _end(mlp, tail)
    with graph.inserting_before(mark.next):
        weights = graph.call_method("reshape", (routing, -1)) if routing is not None else None
        padding = _Padding(graph, mlp.x, mlp.down.offsets, implementation(name).alignment)
        inputs = (padding.on(mlp.x), padding.offsets, mlp.gate.weight, mlp.up_weight, mlp.down.weight)
        biases = (mlp.gate_bias, mlp.up_bias, tail.bias)
        options = (glu.alpha, glu.limit, glu.offset, glu.interleave, tail.routing is not None, name)
        experts = graph.call_function(grouped_swiglu, (*inputs, *biases, padding.on(weights), *options))
        # The other results are what backward needs.
        result = padding.off(graph.call_function(operator.getitem, (experts, 0)))
    node = mark.next
    while node is not result.next:
        stand_in(node, mlp.down.node)
        node = node.next
    result.meta["example_value"] = value(tail.last)
    where = place(mlp.down.node)
    old = mlp.inside.union(tail.nodes)
    tail.last.replace_all_uses_with(result, delete_user_cb=lambda user: user not in old)
    for node in sorted(old, reverse=True):
        graph.erase_node(node)
    return Fused(where, name, _form(mlp, tail) + padding.remark, choice.why)


class _Padding:
    """Puts tokens and routing weights where an implementation wants them, once, and takes the result back."""

    def __init__(self, graph: fx.Graph, x: fx.Node, offsets: fx.Node | None, alignment: int) -> None:
        assert offsets is not None
        self.graph, self.offsets, self.alignment = graph, offsets, alignment
        if alignment > 1:
            rows = graph.call_method("size", (x, 0))
            made = graph.call_function(pad_groups, (offsets, rows, alignment))
            self.offsets, self.inside, self.places = (
                graph.call_function(operator.getitem, (made, i)) for i in range(3)
            )

    def on(self, node: fx.Node | None) -> fx.Node | None:
        if node is None or self.alignment == 1:
            return node
        return self.graph.call_function(take_rows, (node, self.inside, self.places))

    def off(self, node: fx.Node) -> fx.Node:
        if self.alignment == 1:
            return node
        return self.graph.call_function(take_rows, (node, self.places, self.inside))

    @property
    def remark(self) -> str:
        return "" if self.alignment == 1 else f", padded to multiples of {self.alignment} tokens per expert"


def _case(mlp: GatedMlp, tail: _Tail) -> Case:
    x, down = value(mlp.x), value(mlp.down.weight)
    assert x is not None and down is not None
    return Case(
        x.device,
        x.dtype,
        hidden=int(down.shape[-1]),
        inner=int(down.shape[-2]),
        biased=any(bias is not None for bias in (mlp.gate_bias, mlp.up_bias, tail.bias)),
        glu=mlp.glu,
        joined=mlp.up is None,
        experts=int(down.shape[0]),
        out_by_in=all(_lies_out_by_in(weight) for weight in (mlp.gate.weight, mlp.up_weight, mlp.down.weight)),
    )


def _lies_out_by_in(weight: fx.Node | None) -> bool:
    """Of ``[experts, in, out]``: whether each matrix is the transpose of a contiguous one."""
    found = value(weight) if weight is not None else None
    return found is None or (found.stride(-2) == 1 and found.stride(-1) == found.shape[-2])


def _form(mlp: GatedMlp, tail: _Tail) -> str:
    weight = value(mlp.gate.weight)
    parts = [mlp.glu.name, "gate and up joined" if mlp.up is None else "gate and up separate"]
    if mlp.glu.interleave:
        parts.append(f"interleave {mlp.glu.interleave}")
    if tail.bias is not None or mlp.gate_bias is not None:
        parts.append("biases")
    if mlp.routing is not None or tail.routing is not None:
        parts.append(f"routing weight {'before' if mlp.routing is not None else 'after'} the second product")
    return f"{weight.shape[0] if weight is not None else '?'} experts, {', '.join(parts)}{tail.remark}"
