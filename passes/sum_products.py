"""Joint graph: a product over few columns that is added to a large one is computed with it.

The output of a layer with an adapter, ``x·W + h·B``, is two products and a sum, and so is the gradient of its input. As
they stand, the small product is written and read, and the large one is read once more than its reader needs it.
Requires kernels that compute the sum (Hopper, bf16). Provides ``fxshard::sum_of_products`` in the place of the sum of
a large and a small product; in a sum of several, as where layers read the same input, each small product goes to a
large one. What is rounded once there was rounded three times before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fxshard.kernels import hopper_products
from fxshard.kernels.sum_op import NARROW, WIDE, sum_of_products
from fxshard.passes.context import PassContext
from fxshard.passes.matrix_products import call_at

_ADD, _MM, _VIEW = torch.ops.aten.add.Tensor, torch.ops.aten.mm.default, torch.ops.aten.view.default


def sum_products(joint: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    changed = False
    for node in reversed(joint.graph.find_nodes(op="call_function", target=_ADD)):  # a sum before its terms
        if node.users and _has_kernels(node, context):
            changed |= _rewrite(node)
    if changed:
        joint.graph.eliminate_dead_code()
        joint.recompile()
    return joint


def _has_kernels(node: fx.Node, context: PassContext) -> bool:
    """Whether sums are computed here, or on the machine that is planned for."""
    value, machine = node.meta["val"], context.hardware
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bfloat16:
        return False
    if context.planned_experts is None or machine is None:
        return hopper_products.available(value.device)
    return machine.capability is not None and hopper_products.capability_refusal(*machine.capability) is None


@dataclass(frozen=True)
class _Term:
    """What is added; ``product``: the product that it is, maybe in another shape, if nothing else reads that."""

    node: fx.Node
    product: fx.Node | None

    @property
    def depth(self) -> int:
        """The columns that the product is summed over; 0 where there is none, or sizes are open."""
        if self.product is None:
            return 0
        left, right = (arg.meta["val"] for arg in self.product.all_input_nodes)
        known = isinstance(left.shape[1], int) and isinstance(right.shape[1], int) and right.shape[1] % 8 == 0
        return int(left.shape[1]) if known else 0


def _rewrite(root: fx.Node) -> bool:
    terms = list(_terms(root))
    if len({term.node for term in terms}) < len(terms):
        return False
    pairs = dict(_pairs(terms))
    if not pairs:
        return False
    taken = {narrow.node for narrow in pairs.values()}
    order = {node: i for i, node in enumerate(root.graph.nodes)}
    added: list[fx.Node] = []
    for term in terms:
        if term in pairs:
            added.append(_sum(term, pairs[term], root, order))
        elif term.node not in taken:
            added.append(term.node)
    total, *others = added
    with root.graph.inserting_before(root):
        for each in others:
            total = call_at(root, _ADD, total, each)
    root.replace_all_uses_with(total)
    return True


def _terms(root: fx.Node) -> Iterator[_Term]:
    """What a sum consists of, in order; sums that nothing else reads are taken apart."""
    terms = [arg for arg in root.args if isinstance(arg, fx.Node) and arg.meta["val"].shape == root.meta["val"].shape]
    if root.kwargs or len(set(terms)) < 2:
        yield _Term(root, None)  # no plain sum of two tensors: it stays one term
        return
    for arg in terms:
        if arg.target is _ADD and len(arg.users) == 1:
            yield from _terms(arg)
            continue
        source = arg.args[0] if arg.target is _VIEW and len(arg.users) == 1 else arg
        is_product = isinstance(source, fx.Node) and source.target is _MM and len(source.users) == 1
        yield _Term(arg, source if is_product else None)  # type: ignore[arg-type]


def _pairs(terms: list[_Term]) -> Iterator[tuple[_Term, _Term]]:
    """A large product and a small one, as often as there are both."""
    small = [term for term in terms if 0 < term.depth <= NARROW and term.depth % 8 == 0]
    for term in terms:
        if term.depth >= WIDE and term.depth % hopper_products.DEPTH == 0:
            fitting = next((other for other in small if _fit(term.product, other.product)), None)
            if fitting is not None:
                small.remove(fitting)
                yield term, fitting


def _fit(large: fx.Node | None, small: fx.Node | None) -> bool:
    """Whether two products have one shape, right operands that lie alike, and are both saved or both computed again."""
    assert large is not None and small is not None
    if large.meta["val"].shape != small.meta["val"].shape:
        return False  # views of them may be added all the same
    dense = [tuple(stride == 1 for stride in each.all_input_nodes[-1].meta["val"].stride()) for each in (large, small)]
    return dense[0] == dense[1] and large.meta.get("recompute") == small.meta.get("recompute")


def _sum(large: _Term, small: _Term, root: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """The sum of two products, in the shape of the whole sum."""
    assert large.product is not None and small.product is not None
    graph = root.graph
    with graph.inserting_before(max(large.product, small.product, key=order.__getitem__)):
        total = call_at(large.product, sum_of_products, *large.product.args, *small.product.args)
    if total.meta["val"].shape == root.meta["val"].shape:
        return total
    with graph.inserting_before(root):
        return call_at(large.node, _VIEW, total, list(root.meta["val"].shape))
