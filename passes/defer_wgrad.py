"""Backward: weight-gradient products move to where they hide communication that would stand bare.

Requires the gradient outputs tied to parameters. Nothing but a gradient waits for such a product, so it may run later.
The end of backward gains from that: the last reduction comes after the last product, and nothing hides it. If the
bucket that is complete last (often the embedding) is at least as large as the one before it, the products of the latter
run after it: its reduction then runs during them, and the smaller one is left over. The same if no product stands
between the two, whatever their sizes: as traced nothing would hide either of them. One rank reduces nothing and moves
nothing. What moves follows from the graph and the sizes of parameters alone, so that ranks whose batches differ move
the same products and reduce in the same order. (Collectives of the model's own: ``order_collectives``.)

One bucket's products are moved, so the activations of one unit live until there; those of all other units are gone by
then.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxshard._torch import private
from fxshard.passes.context import PassContext
from fxshard.passes.cuts import is_heavy, is_lookup
from fxshard.schedule.aliases import is_view
from fxshard.schedule.params import GRADS


@dataclass(frozen=True)
class Movable:
    """A product that only gradients wait for, with what leads to it and to them alone, in order.

    One product can be several gradients: that of stacked weights, if the parameters are what was stacked.
    """

    nodes: tuple[fx.Node, ...]
    buckets: frozenset[int | None]
    """Where those gradients go."""


def defer_wgrad(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    if not context.options.debug.defer_wgrad:
        return module
    graph = module.graph
    products = _products(graph, context)
    _smallest_last(graph, products, context)
    return module


def _products(graph: fx.Graph, context: PassContext) -> list[Movable]:
    output = graph.output_node()
    gradients = _gradients(output, context)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found = []
    for product in order:
        nodes = _made_of(product, output) if is_heavy(product) else []
        results = [node for node in nodes if output in node.users]
        buckets = {bucket for node in results for bucket in gradients[node]}
        if not buckets or None in buckets:
            continue
        for operand in product.all_input_nodes:
            while is_view(operand) and all(user is output or user in nodes for user in operand.users):
                nodes.append(operand)
                operand = operand.all_input_nodes[0]
        found.append(Movable(tuple(sorted(nodes, key=order.__getitem__)), frozenset(buckets)))
    return found


def _gradients(output: fx.Node, context: PassContext) -> dict[fx.Node, set[int | None]]:
    """{node: buckets of the parameters whose gradient it is, and None where it is returned as something else}"""
    found: dict[fx.Node, set[int | None]] = {}
    refs = output.meta.get(GRADS, ())
    for i, node in enumerate(output.args[0]):  # type: ignore[arg-type, union-attr]
        if isinstance(node, fx.Node):
            ref = refs[i] if i < len(refs) else None
            bucket = ref.bucket if ref is not None and context.bucket(ref).trainable else None
            found.setdefault(node, set()).add(bucket)
    return found


def _made_of(product: fx.Node, output: fx.Node) -> list[fx.Node]:
    """The product and all that is computed from it and from nothing else; empty if something else needs it."""
    nodes = [product]
    for node in nodes:  # which grows
        for user in node.users:
            if user is output or user in nodes:
                continue
            if is_heavy(user) or private.is_wait(user) or len(user.all_input_nodes) != 1:
                return []
            nodes.append(user)
    return nodes


def _smallest_last(graph: fx.Graph, products: list[Movable], context: PassContext) -> None:
    """The products of the last bucket but one run after the last gradient, if that leaves less for the end."""
    output = graph.output_node()
    order = {node: i for i, node in enumerate(graph.nodes)}
    complete: dict[int, int] = {}
    for gradient, buckets in _gradients(output, context).items():
        for bucket in buckets:
            if bucket is not None:
                complete[bucket] = max(complete.get(bucket, 0), order[gradient])
    if len(complete) < 2:
        return
    before, last = sorted(complete, key=complete.__getitem__)[-2:]
    if context.buckets[before].reducing_ranks == context.buckets[last].reducing_ranks == 1:
        return  # nothing is sent, and every cut costs launches and compilations
    between = [node for node in order if complete[before] < order[node] <= complete[last]]
    hides = any(is_heavy(node) and not is_lookup(node) for node in between)
    if hides and context.buckets[last].grad_bytes < context.buckets[before].grad_bytes:
        return
    for product in products:
        if product.buckets == {before}:
            for member in product.nodes:
                output.prepend(member)
