"""From queries or keys back to the weight that makes them: which of its rows are which head.

Between the two, values may be moved and combined linearly, as rotary positions do, so that scaling rows of the weight
scales them. Rows are read from strides: up to the first operator that computes, a tensor of heads is a view of what
the product gave, be the weight that of queries alone or one for queries, keys and values. Where tensor-parallel ranks
have heads of their own, the product is one of DTensors, and this rank's part of it is what is looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxshard._torch import private
from fxshard.passes.calls import argument, call, past_casts, place, shape, value, written
from fxshard.passes.context import PassContext
from fxshard.planner.head_rows import Projection
from fxshard.schedule.params import PARAM

MOVES = ("transpose", "reshape", "contiguous", "cast", "index", "cat", "stack", "repeat_interleave", "add")
"""What is linear in all its operands."""
ALSO = (
    *(operator.neg, torch.neg, "neg", operator.sub, torch.sub, "sub", "clone", torch.clone, "expand", "expand_as"),
    *("unsqueeze", torch.unsqueeze, "squeeze", torch.squeeze, "permute", torch.permute),
    *(torch.view_as_real, torch.view_as_complex),
)


class NotLinear(Exception):
    """Why values do not scale with rows of one weight."""


def find_projection(operand: fx.Node, width: int, given: Mapping[fx.Node, fx.Node], context: PassContext) -> Projection:
    """The projection that makes ``operand``, heads of ``width``. ``given``: what inputs of nested graphs are."""
    views: list[tuple[fx.Node, fx.Node]] = []
    """Tensors of heads, and the product that each is a view of."""
    stack, seen = [operand], {operand}
    while stack:
        node = stack.pop()
        made = node
        while (source := _viewed(made)) is not None:
            made = source
        if call(_unscaled(made)) == "linear":
            views += [(node, made)] if 0 not in shape(node) else []
        else:
            stack += [each for each in _terms(made) if each not in seen]
            seen.update(stack)
    products = {_unscaled(made) for _, made in views}
    if len(products) != 1:
        raise NotLinear(f"they are sums of {len(products)} projections")
    (product,) = products
    return _projection(product, _heads([_rows(*each) for each in views], width), given, context)


def _unscaled(node: fx.Node) -> Any:
    """What a node computes before it was cast, multiplied by a number, and taken out of a DTensor."""
    while (found := _one_operand(past_casts(node)) or _distributed(past_casts(node))) is not None:
        node = found
    return past_casts(node)


def _distributed(node: Any) -> fx.Node | None:
    """The DTensor that a node is this rank's part of, or is, unchanged."""
    if not isinstance(node, fx.Node) or _name(node).removeprefix("prim_") not in ("to_local", "redistribute"):
        return None  # torch 2.11 calls functions of its own, prim_to_local and prim_redistribute
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = value(source), value(node)
    if isinstance(after, DTensor) and isinstance(before, DTensor) and after.placements != before.placements:
        raise NotLinear(
            f"tensor-parallel ranks exchange them at {place(node)}, after their linear layer; leave each rank its own "
            "heads (ColwiseParallel())"
        )
    return source


def _one_operand(node: Any) -> fx.Node | None:
    single = call(node) in ("mul", "div") and len(node.all_input_nodes) == 1 and isinstance(node.args[0], fx.Node)
    return node.args[0] if single and not written(node) else None


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, if it is one."""
    if node.op not in ("call_function", "call_method") or call(node) == "linear" or _distributed(node) is not None:
        return None
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and value(source) is None and node.target is operator.getitem:
        source = source.args[0]  # one of several parts
    before, after = value(source), value(node)
    if written(node):
        raise NotLinear(f"{node.name} changes them in place")
    shared = before is not None and after is not None and private.share_memory(before, after)
    return source if shared else None  # type: ignore[return-value]


def _terms(node: fx.Node) -> list[fx.Node]:
    """The operands that depend on parameters, of an operator that is linear in them."""
    operands = [each for each in node.all_input_nodes if (held := value(each)) is not None and held.requires_grad]
    if node.op not in ("call_function", "call_method"):
        raise NotLinear(f"they come from {node.name}, which is no projection")
    what = call(node)
    scaled = what == "mul" or (what == "div" and operands == [node.args[0]])
    picked = what == "index" and sum(value(each) is not None for each in node.all_input_nodes) > 1  # any heads
    if picked or not (what in MOVES or node.target in ALSO or (scaled and len(operands) == 1)):
        raise NotLinear(
            f"{_name(node)} at {place(node)} lies between them and their linear layer, "
            "and does more than move, rotate, scale"
        )
    return operands


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _rows(view: fx.Node, made: fx.Node) -> torch.Tensor:
    """The rows of the weight that each element of a token is made by, in the order of the view's dimensions."""
    whole, part = value(made), value(view)
    while part is not None and whole is not None and part.dtype != whole.dtype:  # as complex numbers
        view = _viewed(view)  # type: ignore[assignment]
        part = value(view)
    assert whole is not None and part is not None
    count, start = whole.shape[-1], part.storage_offset()
    if not isinstance(start, int) or start >= count or whole.stride(-1) != 1:
        raise NotLinear(f"{view.name} is a part of {made.name} that begins elsewhere than at a token")
    rows = torch.tensor(start)
    for size, stride in zip(part.shape, part.stride(), strict=True):
        # Steps from token to token are as long as the product is wide, or longer; of repeated heads they are zero.
        if isinstance(size, int) and isinstance(stride, int) and size > 1 and 0 < stride < count:
            rows = rows.unsqueeze(-1) + stride * torch.arange(size)
    return rows


def _heads(rows: list[torch.Tensor], width: int) -> dict[int, int]:
    """Row → head."""
    count, rest = divmod(len(torch.cat([each.flatten() for each in rows]).unique()), width)
    found: dict[int, int] = {}
    for each in rows:
        if rest or count not in [1, *torch.tensor([1, *each.shape]).cumprod(0).tolist()] or each.numel() % count:
            raise NotLinear(f"dimensions {[*each.shape]} of rows are not heads of {width}")
        for head, own in enumerate(each.reshape(count, -1).tolist()):
            if any(found.setdefault(row, head) != head for row in own):
                raise NotLinear("heads share rows of their weight")
    return found


def _projection(
    product: fx.Node, head_of: dict[int, int], given: Mapping[fx.Node, fx.Node], context: PassContext
) -> Projection:
    def name(node: Any) -> str:
        node = past_casts(node)
        while node in given or isinstance(value(node), DTensor):  # which wraps this rank's part of a parameter
            node = past_casts(given[node] if node in given else node.args[0])
        ref = node.meta.get(PARAM) if isinstance(node, fx.Node) else None
        if ref is None or not context.bucket(ref).trainable:
            raise NotLinear(f"{node} in {product.name} is no parameter that is trained")
        return context.bucket(ref).params[ref.position]

    weight, bias = argument(product, 1, "weight"), argument(product, 2, "bias")
    held = value(weight)
    rows = range((private.wrapped(held) if isinstance(held, DTensor) else held).shape[0])  # type: ignore[union-attr]
    return Projection(
        name(weight), name(bias) if isinstance(bias, fx.Node) else None, tuple(head_of.get(row, -1) for row in rows)
    )
