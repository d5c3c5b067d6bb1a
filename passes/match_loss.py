"""Recognise a head and its loss: a product with a weight, maybe a soft cap, a cast, a choice of tokens; cross-entropy.

The way back from the loss to the product is followed step by step. Steps that choose or arrange tokens (slices,
reshapes) do the same to the hidden states: a row of logits depends on one row of them. How labels are shifted does not
matter, they are taken as the loss gets them. Every other step, and every other reader of a value on the way, means that
the loss needs its logits.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxshard._torch import private
from fxshard.passes.calls import (
    TRANSFORMED,
    argument,
    call,
    cast_from,
    changed_between,
    dense_product,
    same_dtype,
    shape,
    switches_modes,
    value,
    written,
)


@dataclass(frozen=True)
class HeadLoss:
    """A product, a loss, and what lies between them."""

    loss: fx.Node
    product: fx.Node
    hidden: fx.Node
    weight: fx.Node
    transposed: bool
    """Whether ``weight`` is ``[in, classes]``, and not ``[classes, in]`` as ``nn.Linear`` has it."""
    bias: fx.Node | None
    steps: tuple[fx.Node, ...]
    """From the product, which is the first, to what the loss is given."""
    cap: tuple[float, bool, float]
    """See ``kernels.loss_rows.Cap``."""
    labels: fx.Node
    ignore_index: int
    mean: bool

    @property
    def classes(self) -> int:
        return int(shape(self.product)[-1])

    @property
    def logits_bytes(self) -> int:
        """Of the logits that the loss is given, in the dtype of the product."""
        product = value(self.product)
        assert product is not None
        sizes = (private.size_hint(size) for size in shape(self.steps[-1]))
        return math.prod(sizes) * product.dtype.itemsize

    @property
    def returned(self) -> bool:
        """Whether the graph returns logits."""
        return any(user.op == "output" for node in self.steps for user in node.users)


@dataclass(frozen=True)
class NoMatch:
    """Why a loss needs its logits."""

    reason: str


class _Miss(Exception):
    """Why a loss needs its logits."""


def is_loss(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is F.cross_entropy


def match_loss(loss: fx.Node) -> HeadLoss | NoMatch:
    """The head and the loss that end in a call of ``cross_entropy``."""
    try:
        return _match(loss)
    except _Miss as miss:
        return NoMatch(str(miss))


def _match(loss: fx.Node) -> HeadLoss:
    given, labels = argument(loss, 0, "input"), argument(loss, 1, "target")
    mean, ignore_index = _check_loss(loss, labels)
    node = _classes_last(given, labels)
    steps = [given] if node is not given else []
    while (found := _product(node)) is None:
        steps.append(node)
        node = _before(node)
    steps = [node, *reversed(steps)]
    hidden, weight, bias, transposed = found
    bias, cap = _elementwise(steps, bias)
    _check_types(loss, steps, hidden, weight, bias)
    matched = HeadLoss(loss, node, hidden, weight, transposed, bias, tuple(steps), cap, labels, ignore_index, mean)
    _check_readers(matched)
    _check_between(matched)
    return matched


# -- the loss --------------------------------------------------------------------------------------------------------

_LOSS_OPTIONS = {"weight": (2, None), "size_average": (3, None), "reduce": (5, None), "label_smoothing": (7, 0.0)}


def _check_loss(loss: fx.Node, labels: Any) -> tuple[bool, int]:
    """(whether it is the mean, which label does not count)"""
    for name, (position, default) in _LOSS_OPTIONS.items():
        if argument(loss, position, name, default) != default:
            raise _Miss(f"it has {name}=")
    reduction, ignore_index = argument(loss, 6, "reduction", "mean"), argument(loss, 4, "ignore_index", -100)
    if reduction not in ("mean", "sum"):
        raise _Miss(f"it has reduction={reduction!r}")
    if type(ignore_index) is not int:
        raise _Miss("which label it ignores is not a number")
    held = value(labels)
    if held is None or held.dtype != torch.int64:
        raise _Miss("its labels are not classes (int64)")
    return reduction == "mean", ignore_index


def _classes_last(given: Any, labels: fx.Node) -> fx.Node:
    """Logits whose last dimension are the classes: ``cross_entropy`` takes ``[tokens, classes]``, or the second one."""
    dims = len(shape(given))
    if dims == 2 and len(shape(labels)) == 1:
        return given  # type: ignore[no-any-return]
    swapped = {argument(given, i, name) for i, name in ((1, "dim0"), (2, "dim1"))} if call(given) == "transpose" else {}
    if dims == 3 and len(shape(labels)) == 2 and swapped in ({1, 2}, {1, -1}, {-2, -1}, {-2, 2}):
        return given.args[0]  # type: ignore[no-any-return]
    raise _Miss(f"its logits are {shape(given)} and its labels {shape(labels)}")


# -- from the loss to the product ------------------------------------------------------------------------------------


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """(hidden, weight, bias, whether the weight is ``[in, classes]``) of a product with a weight."""
    linear = dense_product(node)
    if linear is not None:
        return linear.x, linear.weight, linear.bias, False
    if call(node) == "matmul":
        hidden, weight = node.args[0], argument(node, 1, "other", node.kwargs.get("mat2"))
        if len(shape(weight)) == 2 and len(shape(hidden)) >= 2:
            return hidden, weight, None, True  # type: ignore[return-value]
    return None


def _before(node: Any) -> fx.Node:
    """What a step between product and loss is given."""
    kind = call(node)
    if kind is None or written(node):
        raise _Miss(f"{_name(node)} stands between it and a product")
    if kind in ("mul", "add"):
        tensors = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
        if kind == "add" and len(tensors) == 2:
            source, bias = sorted(tensors, key=lambda arg: len(shape(arg)), reverse=True)
            if shape(bias) == shape(source)[-1:]:
                return source
        elif kind == "mul" and len(tensors) == 1 and _is_number(_other(node, tensors[0])):
            return tensors[0]
    elif kind == "div" and not node.kwargs and isinstance(node.args[0], fx.Node) and _is_number(node.args[1]):
        return node.args[0]
    elif kind in ("tanh", "contiguous") or cast_from(node) is not None or _keeps_rows(node):
        return node.args[0]  # type: ignore[no-any-return]
    raise _Miss(f"{_name(node)} stands between it and a product")


def _name(node: Any) -> str:
    return f"{node.name} ({getattr(node.target, '__name__', node.target)})" if isinstance(node, fx.Node) else str(node)


def _other(node: fx.Node, tensor: fx.Node) -> Any:
    return node.args[1] if node.args[0] is tensor else node.args[0]


def _is_number(found: Any) -> bool:
    return type(found) in (int, float) and found != 0 and math.isfinite(found)


def _keeps_rows(node: fx.Node) -> bool:
    """Whether a step chooses or arranges rows, and leaves each of them as it is."""
    if call(node) not in ("reshape", "index"):
        return False
    classes = shape(node.args[0])[-1:]
    if len(shape(node)) < 2 or not classes or type(classes[0]) is not int or shape(node)[-1:] != classes:
        return False
    return rows_call(node) is not None


@dataclass(frozen=True)
class RowsCall:
    """A call that chooses or arranges rows: a node of the graph without its first argument."""

    op: str
    target: Any
    args: tuple[Any, ...]


def rows_call(node: fx.Node, width: int = 0) -> RowsCall | None:
    """A slice or reshape of logits as one of something with rows ``width`` wide; None if it is neither."""
    if call(node) == "index":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        leaves = _leaves_last(index, len(shape(node.args[0])))
        return RowsCall("call_function", operator.getitem, (index,)) if leaves else None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "flatten":
        dims = (argument(node, 1, "start_dim", 0), argument(node, 2, "end_dim", -1))
        return RowsCall("call_method", "flatten", dims)
    sizes: Any = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple | list) else node.args[1:]
    known = all(type(size) is int or isinstance(size, fx.Node) for size in sizes)
    if name not in ("view", "reshape") or node.kwargs or not sizes or not known:
        return None
    return RowsCall("call_method", "reshape", (*sizes[:-1], width))


def _leaves_last(index: tuple[Any, ...], dims: int) -> bool:
    """Whether an index takes the whole last dimension, and only slices or picks from others."""
    if any(each is not Ellipsis and type(each) not in (slice, int) for each in index):
        return False
    if any(isinstance(part, fx.Node) and value(part) is not None for each in index for part in _bounds(each)):
        return False
    if index[-1] is Ellipsis:
        return len(index) <= dims
    return index[-1] == slice(None) or (Ellipsis not in index and len(index) < dims)


def _bounds(index: Any) -> tuple[Any, ...]:
    return (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)


# -- what the steps compute ------------------------------------------------------------------------------------------


def _elementwise(steps: list[fx.Node], bias: fx.Node | None) -> tuple[fx.Node | None, tuple[float, bool, float]]:
    """The bias, and the numbers of ``outer · tanh(inner · x)``, of steps in order."""
    inner, outer, tanh = 1.0, 1.0, False
    for node in steps[1:]:
        kind = call(node)
        if kind == "tanh":
            if tanh:
                raise _Miss("there are two tanh between it and the product")
            tanh = True
        elif kind in ("mul", "div"):
            number = float(next(arg for arg in node.args[:2] if not isinstance(arg, fx.Node)))  # type: ignore[arg-type]
            factor = number if kind == "mul" else 1 / number
            inner, outer = (inner, outer * factor) if tanh else (inner * factor, outer)
        elif kind == "add":
            if bias is not None or tanh or inner != 1.0 or not same_dtype(node, steps[0]):
                raise _Miss(f"{_name(node)} adds to logits that are scaled, cast or have a bias already")
            bias = min((arg for arg in node.args[:2] if isinstance(arg, fx.Node)), key=lambda arg: len(shape(arg)))
    return bias, (inner, tanh, outer)


# -- whether it can be one operator ----------------------------------------------------------------------------------


def _check_types(loss: fx.Node, steps: list[fx.Node], hidden: Any, weight: Any, bias: Any) -> None:
    operands = [value(node) for node in (steps[0], hidden, weight, *([bias] if bias is not None else []))]
    if not all(private.is_plain(operand) for operand in (*operands, value(loss))):
        raise _Miss("its tensors have a class of their own")
    product = operands[0]
    assert product is not None
    types = {(operand.dtype, operand.device) for operand in operands if operand is not None}
    if len(types) > 1:
        raise _Miss("hidden states, weight and product differ in type, as under autocast")
    if not all(type(size) is int for size in (*shape(weight), *shape(steps[0])[-1:])):
        raise _Miss("the weight has a symbolic size")
    wider = {product.dtype} if product.dtype == torch.float64 else {product.dtype, torch.float32}
    for node in (*steps, loss):
        found = value(node)
        if found is None or found.dtype not in wider or found.device != product.device:
            raise _Miss(f"{_name(node)} is not computed in {' or '.join(sorted(map(str, wider)))} on {product.device}")


def _check_readers(matched: HeadLoss) -> None:
    following = (*matched.steps[1:], matched.loss)
    for node, reader in zip(matched.steps, following, strict=True):
        other = next((user for user in node.users if user is not reader and user.op != "output"), None)
        if other is not None:
            raise _Miss(f"logits are read by {_name(other)} too")


def _check_between(matched: HeadLoss) -> None:
    """What the operator reads where the loss stands must be what the product read, and in the same mode."""
    node, inputs = matched.product, [matched.hidden, matched.weight, *matched.steps]
    changed = changed_between([*inputs, *([matched.bias] if matched.bias is not None else [])], node, matched.loss)
    if changed is not None:
        raise _Miss(f"{changed.name} is changed in place before it")
    while node is not matched.loss:
        if switches_modes(node):
            raise _Miss("gradients or autocast are switched on or off between it and the product")
        if TRANSFORMED in node.meta:
            raise _Miss("a transform of torch.func is at work on it")
        node = node.next
