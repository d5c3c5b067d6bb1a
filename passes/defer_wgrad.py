"""Backward: weight-gradient products move to where they hide communication that would stand bare.

Requires the gradient outputs tied to parameters. Nothing but a gradient waits for such a product, so it may run later.
Two places gain from that, and both follow from the graph and the sizes of parameters alone, so that ranks whose batches
differ move the same products and reduce in the same order:

* the end of backward. Behind the last product stands the last reduction, and nothing hides it. If the bucket that is
  complete last (often the embedding) is at least as large as the one before it, the products of the latter run behind
  it: its reduction then runs beside them, and the smaller one is left over.
* a collective of the model's own (tensor or expert parallel). Products that stand before its start run between its
  start and its wait.

At the end of backward one bucket's products are moved, so the activations of one unit live until there; those of all
other units are gone by then. At a collective they live until its wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxshard import _compat
from fxshard.passes.aliases import is_view
from fxshard.passes.context import GRADS, ParamRef, PassContext
from fxshard.passes.cuts import is_heavy


def defer_wgrad(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    if not context.options.defer_wgrad:
        return module
    graph = module.graph
    products = _products(graph, context)
    for wait in [node for node in graph.nodes if _compat.is_wait(node)]:
        _fill(wait, products)
    _smallest_last(graph, products, context)
    return module


def _products(graph: fx.Graph, context: PassContext) -> dict[ParamRef, list[fx.Node]]:
    """{parameter: its gradient's product and what only leads from there to the gradient, or only to the product}"""
    output = graph.output_node()
    found: dict[ParamRef, list[fx.Node]] = {}
    gradients: Iterable[object] = output.args[0]  # type: ignore[assignment]
    for ref, gradient in zip(output.meta.get(GRADS, ()), gradients, strict=False):
        if ref is None or not isinstance(gradient, fx.Node) or not context.bucket(ref).trainable:
            continue
        chain = [gradient]
        while not is_heavy(chain[-1]) and len(chain[-1].all_input_nodes) == 1 and _only_for(chain[-1], chain, output):
            chain.append(chain[-1].all_input_nodes[0])
        if is_heavy(chain[-1]) and _only_for(chain[-1], chain, output):
            found[ref] = chain[::-1]
    order = {node: i for i, node in enumerate(graph.nodes)}
    for chain in found.values():
        for operand in chain[0].all_input_nodes:
            while is_view(operand) and _only_for(operand, chain, output):
                chain.append(operand)
                operand = operand.all_input_nodes[0]
        chain.sort(key=order.__getitem__)
    return found


def _only_for(node: fx.Node, chain: list[fx.Node], output: fx.Node) -> bool:
    return all(user is output or user in chain for user in node.users)


def _fill(wait: fx.Node, products: dict[ParamRef, list[fx.Node]]) -> None:
    """Products that stand between the previous wait and a collective's start run between its start and its wait."""
    (start,) = wait.all_input_nodes
    earlier: set[fx.Node] = set()
    node = start.prev
    while node.op == "call_function" and not _compat.is_wait(node):
        earlier.add(node)
        node = node.prev
    for chain in products.values():
        if earlier.issuperset(chain) and start not in {user for member in chain for user in member.users}:
            for member in chain:
                wait.prepend(member)


def _smallest_last(graph: fx.Graph, products: dict[ParamRef, list[fx.Node]], context: PassContext) -> None:
    """The products of the last bucket but one run behind the last gradient, if that leaves the smaller for the end."""
    output = graph.output_node()
    order = {node: i for i, node in enumerate(graph.nodes)}
    complete: dict[int, int] = {}
    gradients: Iterable[object] = output.args[0]  # type: ignore[assignment]
    for ref, gradient in zip(output.meta.get(GRADS, ()), gradients, strict=False):
        if ref is not None and isinstance(gradient, fx.Node) and context.bucket(ref).trainable:
            complete[ref.bucket] = max(complete.get(ref.bucket, 0), order[gradient])
    if len(complete) < 2:
        return
    before, last = sorted(complete, key=complete.__getitem__)[-2:]
    if context.buckets[last].grad_bytes < context.buckets[before].grad_bytes:
        return
    for ref, chain in products.items():
        if ref.bucket == before:
            for member in chain:
                output.prepend(member)
