"""Recognise a gated MLP by what it computes: two products, between them ``act(gate) · up``, maybe a routing weight.

The product of the activation is taken apart into its factors, so neither order nor grouping matters; gate and up are
followed to the product they come from, through casts, clamps and whatever splits a joined projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxshard._torch import private
from fxshard.kernels.glu import Glu
from fxshard.passes.calls import (
    TRANSFORMED,
    Product,
    argument,
    call,
    cast_from,
    changed_between,
    past_casts,
    same_dtype,
    shape,
    switched_between,
    value,
    writes,
)
from fxshard.passes.expert_bias import Bias, added_bias


class Miss(Exception):
    """Why something that looks like experts is not."""


class NoGate(Miss):
    """It does not even look like them: no gated SiLU precedes the product."""


@dataclass
class GatedMlp:
    """Two (or three) products and what lies between them."""

    gate: Product
    up: Product | None
    """None where ``gate`` computes both, joined."""
    down: Product
    glu: Glu
    routing: fx.Node | None
    """The routing weight before the second product, ``[tokens, 1]``."""
    gate_bias: fx.Node | None = None
    up_bias: fx.Node | None = None
    inside: set[fx.Node] = field(default_factory=set)
    """Nodes that nothing needs once the whole is one."""

    @property
    def x(self) -> fx.Node:
        return self.gate.x

    @property
    def up_weight(self) -> fx.Node | None:
        return self.up.weight if self.up is not None else None


FindProduct = Callable[[Any], Product | None]


def match_gated_mlp(down: Product, product: FindProduct) -> GatedMlp:
    """The gated MLP whose second product is ``down``; ``product`` says what counts as the first."""
    routing, others = _split_off_routing(_factors(down.x), shape(down.x))
    gate, alpha, up = _activation(others)
    gate, limit = _clamped(gate, lower=False)
    up, offset = _with_number(up, "add", 0.0)
    up, up_limit = _clamped(up, lower=True)
    if limit != up_limit:
        raise Miss(f"gate and up are clamped differently ({limit:g} and {up_limit:g})")
    first, second, interleave = _sources(past_casts(gate), past_casts(up), product)
    matched = GatedMlp(
        first.product,
        second.product if second is not None else None,
        down,
        Glu(alpha, limit, offset, interleave),
        routing,
        gate_bias=first.bias.values if first.bias is not None else None,
        up_bias=second.bias.values if second is not None and second.bias is not None else None,
    )
    _check_inputs(matched)
    biases = {source.bias.node for source in (first, second) if source is not None and source.bias is not None}
    matched.inside = _between(matched, biases)
    return matched


# -- the activation --------------------------------------------------------------------------------------------------


def _factors(node: Any) -> list[Any]:
    """A product taken apart, through casts, as far as its factors are tensors."""
    node = past_casts(node)
    if call(node) == "mul" and all(isinstance(arg, fx.Node) for arg in node.args[:2]):
        return [factor for arg in node.args[:2] for factor in _factors(arg)]
    return [node]


def _split_off_routing(factors: list[Any], full: tuple[Any, ...]) -> tuple[fx.Node | None, list[Any]]:
    per_row = [factor for factor in factors if shape(factor) == (*full[:-1], 1) and full[-1] != 1]
    if len(per_row) > 1:
        raise Miss(f"{len(per_row)} factors per token stand before the second product")
    return per_row[0] if per_row else None, [factor for factor in factors if factor not in per_row]


def _activation(factors: list[Any]) -> tuple[Any, float, Any]:
    """(gate, alpha, up) of ``gate · sigmoid(alpha · gate) · up``, which is ``silu(gate) · up`` for alpha 1."""
    silu = [factor for factor in factors if call(factor) == "silu"]
    if len(silu) == 1 and len(factors) == 2:
        factors.remove(silu[0])
        return silu[0].args[0], 1.0, factors[0]
    sigmoid = [factor for factor in factors if call(factor) == "sigmoid"]
    if len(sigmoid) == 1 and len(factors) == 3:
        factors.remove(sigmoid[0])
        inner, alpha = _with_number(sigmoid[0].args[0], "mul", 1.0)
        rest = [factor for factor in factors if factor is not inner]
        if len(rest) == 1:
            return inner, alpha, rest[0]
    other = next((name for name in map(call, factors) if name in ("gelu", "relu")), None)
    if other is not None:
        raise NoGate(f"the activation is {other}, not SiLU")
    if len(factors) == 1:
        raise NoGate("between the products nothing is multiplied: no gate")
    raise NoGate("what lies between the products is no gated SiLU")


def _with_number(node: Any, operation: str, neutral: float) -> tuple[Any, float]:
    """(other operand, number) of ``number · x`` or ``x + number``, in either order; (x, neutral) of anything else."""
    node = past_casts(node)
    if call(node) == operation:
        for number, other in (node.args[:2], node.args[1::-1]):
            if isinstance(number, (int, float)) and isinstance(other, fx.Node):
                return past_casts(other), float(number)
    return node, neutral


def _clamped(node: Any, *, lower: bool) -> tuple[Any, float]:
    node = past_casts(node)
    if call(node) != "clamp":
        return node, math.inf
    low, high = argument(node, 1, "min"), argument(node, 2, "max")
    if isinstance(high, (int, float)) and low == (-high if lower else None):
        return past_casts(node.args[0]), float(high)
    raise Miss(f"{'up' if lower else 'gate'} is clamped to [{low}, {high}]")


# -- where gate and up come from -------------------------------------------------------------------------------------


@dataclass
class _Source:
    product: Product
    bias: Bias | None


def _sources(gate: Any, up: Any, product: FindProduct) -> tuple[_Source, _Source | None, int]:
    whole = _source(gate, product), _source(up, product)
    if whole[0] is not None and whole[1] is not None:
        if not _same_value(whole[0].product.x, whole[1].product.x):
            raise Miss("gate and up project different inputs")
        return whole[0], whole[1], 0
    gate_half, up_half = _half(gate), _half(up)
    if gate_half is None or up_half is None:
        raise Miss("gate and up cannot be traced to the first product")
    joined, first, interleave = gate_half
    other, second, other_interleave = up_half
    if joined is not other or interleave != other_interleave:
        raise Miss("gate and up are parts of different projections")
    if (first, second) != (0, 1):
        raise Miss("gate is not the first half of the joined projection")
    joined, blocks = _blocks(joined) if interleave == 0 else (joined, 0)
    source = _source(past_casts(joined), product)
    if source is None:
        raise Miss("gate and up are parts of something that is no grouped product")
    return source, None, interleave or blocks


def _same_value(a: fx.Node, b: fx.Node) -> bool:
    """One node, or the same casts of one that nothing changes between them."""
    if a is b:
        return True
    for node, other in ((a, b), (b, a)):
        source = cast_from(node)
        if source is not None and same_dtype(source, node):  # which casts nothing
            return _same_value(source, other)
    x, y = cast_from(a), cast_from(b)
    if x is None or y is None or not same_dtype(a, b):
        return False
    first, second = sorted((a, b))
    return _same_value(x, y) and changed_between([x, y], first, second) is None and not switched_between(first, second)


def _source(node: Any, product: FindProduct) -> _Source | None:
    bias = added_bias(node, product)
    found = product(bias.product if bias is not None else node)
    if found is None:
        return None
    return _Source(found, bias if bias is not None else (Bias(found.bias, node, node) if found.bias else None))


def _half(node: Any) -> tuple[Any, int, int] | None:
    """(joined projection, which part, interleave) of a part of the last dimension."""
    if call(node) != "index":
        return None
    source, index = node.args[0], node.args[1]
    width = shape(node)[-1]
    if isinstance(index, int) and call(source) in ("chunk", "split"):
        joined = source.args[0]
        dim = argument(source, 2, "dim", 0)
        rank = len(shape(joined))
        if rank and dim in (-1, rank - 1) and shape(joined)[-1] == 2 * width:
            return joined, index, 0
        return None
    if call(source) == "unbind" and isinstance(index, int):
        return _of_pairs(source.args[0], index, argument(source, 1, "dim", 0))
    if value(source) is None or not isinstance(index, tuple):
        return None
    last = index[-1]
    if any(part not in (Ellipsis, slice(None)) for part in index[:-1]):
        return None
    if isinstance(last, int):
        return _of_pairs(source, last, -1)
    if not isinstance(last, slice) or shape(source)[-1] != 2 * width:
        return None
    start, stop, step = last.start or 0, last.stop, last.step or 1
    if step == 2 and stop is None and start in (0, 1):
        return source, start, 1
    if step == 1 and (start, stop) in ((0, width), (width, None), (width, 2 * width)):
        return source, int(start == width), 0
    return None


def _of_pairs(paired: Any, which: int, dim: int) -> tuple[Any, int, int] | None:
    """A part of ``view(tokens, 2, n)``, which are halves, or of ``view(tokens, n, 2)``, which alternate."""
    sizes = shape(paired)
    if call(paired) != "reshape" or len(sizes) < 2 or sizes[dim] != 2:
        return None
    joined: Any = paired.args[0]
    if sizes[:-2] != shape(joined)[:-1] or dim % len(sizes) < len(sizes) - 2:
        return None
    return joined, which, int(dim % len(sizes) == len(sizes) - 1)


def _blocks(joined: Any) -> tuple[Any, int]:
    """Undo ``view(tokens, blocks, 2, n).transpose(1, 2).reshape(tokens, -1)``: an interleave of n."""
    swapped: Any = joined.args[0] if call(joined) == "reshape" else None
    while call(swapped) == "contiguous":
        swapped = swapped.args[0]
    blocked: Any = swapped.args[0] if call(swapped) == "transpose" else None
    if blocked is None or call(blocked) != "reshape" or len(shape(blocked)) != 4 or shape(blocked)[2] != 2:
        return joined, 0
    dims = {argument(swapped, 1, "dim0") % 4, argument(swapped, 2, "dim1") % 4}
    source = blocked.args[0]
    if dims != {1, 2} or shape(source) != shape(joined) or shape(blocked)[0] != shape(joined)[0]:
        return joined, 0
    return source, int(shape(blocked)[3])


# -- whether it can be one operator ----------------------------------------------------------------------------------


def _check_inputs(matched: GatedMlp) -> None:
    products = [matched.gate, matched.down] + ([matched.up] if matched.up is not None else [])
    if any(product.offsets is not matched.down.offsets for product in products):
        raise Miss("the products are grouped by different offsets")
    # A product whose result has another type runs under autocast, which the operator does not support.
    tensors = [matched.x, *(node for product in products for node in (product.weight, product.node))]
    found = {(value(node).dtype, value(node).device) for node in tensors if value(node) is not None}  # type: ignore[union-attr]
    if len(found) != 1 or any(value(node) is None for node in tensors):
        raise Miss(f"inputs, weights and products differ in type: {sorted(str(dtype) for dtype, _ in found)}")
    other = next((node for node in tensors if not private.is_plain(value(node))), None)
    if other is not None:
        raise Miss(f"{other.name} is a {type(value(other)).__name__}, which has products of its own")


def _between(matched: GatedMlp, biases: set[fx.Node]) -> set[fx.Node]:
    """Everything from the first product to the second that depends on the first; nothing else may use it.

    ``biases`` are the nodes that add those that were found.
    """
    firsts = [matched.gate.node] + ([matched.up.node] if matched.up is not None else [])
    inside: set[fx.Node] = set()
    stack = list(firsts)
    while stack:
        node = stack.pop()
        if node in inside:
            continue
        inside.add(node)
        if node is matched.down.node:
            continue
        if node.op == "output":
            raise Miss("what lies between the products is returned by the model")
        stack += node.users
        if len(inside) > 64:
            raise Miss("what lies between the products has other uses too")
    if matched.down.node not in inside:
        raise Miss("the second product does not depend on the first")
    for node in inside - {matched.down.node}:
        if not node.users and call(node) is None:
            raise Miss(f"{node.name} uses what lies between the products")
        _check_write(node, inside, firsts, node in biases)
        _check_cast(node, matched.down.node)
    if switched_between(min(inside), matched.down.node):
        raise Miss("gradients or autocast are switched on or off between the products")
    if any(TRANSFORMED in node.meta for node in inside):
        raise Miss("a transform of torch.func is at work on it")
    return inside


def _check_cast(node: fx.Node, product: fx.Node) -> None:
    """Casts are looked through. One to a type that holds less than that of the products is there for a reason."""
    if cast_from(node) is not None:
        rounded, computed = value(node), value(product)
        assert rounded is not None and computed is not None
        kept, wanted = torch.finfo(rounded.dtype), torch.finfo(computed.dtype)
        if kept.eps > wanted.eps or kept.max < wanted.max:
            raise Miss(f"{node.name} is rounded to {rounded.dtype} between the products")


def _check_write(node: fx.Node, inside: set[fx.Node], firsts: list[fx.Node], adds_bias: bool) -> None:
    """What is changed in place must not be read in another state than the match assumes, nor the change be lost."""
    base = writes(node)
    if base is None:
        return
    others = [user for user in base.users if user is not node]
    if adds_bias and all(node < user for user in others):
        return
    held = value(base)
    into_a_product = held is None or any(private.share_memory(held, value(first)) for first in firsts)  # type: ignore[arg-type]
    if base not in inside or others or not node.users or into_a_product:
        raise Miss(f"{base.name} is changed in place between the products")
