"""What a node of Dynamo's graph computes, however it was written: function, method or operator.

Used by the passes before autograd, whose graphs hold the calls of the model's source and not yet ATen's.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxshard._torch import private

_CALLS: dict[str, tuple[Any, ...]] = {
    "mul": (operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply"),
    "add": (operator.add, operator.iadd, torch.add, "add", "add_"),
    "div": (operator.truediv, torch.div, torch.divide, torch.true_divide, "div", "divide", "true_divide"),
    "tanh": (torch.tanh, F.tanh, "tanh"),
    "matmul": (operator.matmul, torch.matmul, torch.mm, "matmul", "mm"),
    "silu": (F.silu,),
    "sigmoid": (torch.sigmoid, F.sigmoid, "sigmoid"),
    "clamp": (torch.clamp, torch.clip, "clamp", "clip", "clamp_"),
    "cast": ("to", "float", "bfloat16", "half", "type", "type_as"),
    "chunk": (torch.chunk, "chunk", torch.tensor_split, "tensor_split"),
    "split": (torch.split, "split"),
    "unbind": (torch.unbind, "unbind"),
    "index": (operator.getitem,),
    "transpose": (torch.transpose, torch.swapaxes, "transpose", "swapaxes"),
    "reshape": (torch.reshape, "reshape", "view", torch.unflatten, "unflatten", torch.flatten, "flatten"),
    "contiguous": ("contiguous",),
    "cumsum": (torch.cumsum, "cumsum"),
    "count": (torch.histc, "histc", torch.bincount, "bincount"),
    "repeat_interleave": (torch.repeat_interleave, "repeat_interleave"),
    "index_select": (torch.index_select, "index_select"),
    "linear": (F.linear,),
    "cat": (torch.cat, torch.concat, torch.concatenate),
    "stack": (torch.stack,),
    "gelu": (F.gelu,),
    "relu": (F.relu, torch.relu, "relu"),
}
_MEANING: dict[Any, str] = {target: name for name, targets in _CALLS.items() for target in targets}


def call(node: Any) -> str | None:
    """The kind of call, one of the names above, or None: also for one whose operands are given by keyword."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return None
    try:
        found = _MEANING.get(node.target)
    except TypeError:  # an unhashable target is nothing we know
        return None
    operands = 2 if found in ("add", "mul") else 1
    return None if len(node.args) < operands or {"alpha", "out"} & node.kwargs.keys() else found


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    if name == "dim" and "axis" in node.kwargs:  # which torch takes everywhere
        return node.kwargs["axis"]
    return node.kwargs.get(name, default)


def value(node: Any) -> torch.Tensor | None:
    """The fake tensor that Dynamo computed for a node."""
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def shape(node: Any) -> tuple[Any, ...]:
    found = value(node)
    return tuple(found.shape) if found is not None else ()


def named_shape(node: Any) -> tuple[int | str, ...]:
    """Sizes that can be compared: open ones are given by name, for comparing them themselves would fix them."""
    return named_sizes(shape(node))


def named_sizes(sizes: Iterable[int | torch.SymInt]) -> tuple[int | str, ...]:
    return tuple(map(private.size_name, sizes))


def same_dtype(a: fx.Node, b: fx.Node) -> bool:
    first, second = value(a), value(b)
    return first is not None and second is not None and first.dtype == second.dtype


def past_casts(node: Any) -> Any:
    """What a node computes before it was cast between floating-point types."""
    while (source := cast_from(node)) is not None:
        node = source
    return node


def cast_from(node: Any) -> fx.Node | None:
    """What a node casts from one floating-point type to another, or to the same."""
    source: Any = node.args[0] if call(node) == "cast" else None
    before, after = value(source), value(node)
    if before is None or after is None or before.device != after.device:
        return None
    return source if before.is_floating_point() and after.is_floating_point() else None


def writes(node: fx.Node) -> fx.Node | None:
    """The node whose value a call changes in place, if it does; the first of several."""
    return next(iter(written(node)), None)


def written(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a call changes in place."""
    if node.op not in ("call_function", "call_method"):
        return []
    changed = private.written_arguments(node.target, node.args, node.kwargs)  # which operators say themselves
    if changed is None:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        by_name = name.endswith("_") and not name.endswith("__") and node.target not in _NOT_IN_PLACE
        in_place = bool(node.args) and (by_name or node.target in _IN_PLACE or _asked_in_place(node))
        changed = [node.args[0]] if in_place else []
        changed.append(node.kwargs.get("out"))
    nodes = (each for arg in changed for each in (arg if isinstance(arg, (list, tuple)) else (arg,)))
    return [node for node in nodes if isinstance(node, fx.Node)]


def _asked_in_place(node: fx.Node) -> bool:
    """Whether ``inplace`` is among the arguments, named or not, as that of ``F.relu(x, True)``."""
    if getattr(node.target, "__module__", None) != F.__name__:
        return node.kwargs.get("inplace") is True
    return argument(node, _inplace_position(node.target), "inplace") is True


@cache
def _inplace_position(function: Callable[..., Any]) -> int:
    """Where among the arguments of one of ``torch.nn.functional`` it is; far away if it has none."""
    try:
        return list(inspect.signature(function).parameters).index("inplace")
    except ValueError:  # or no signature
        return sys.maxsize


_IN_PLACE = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
    *(operator.ipow, operator.iand, operator.ior, operator.ixor, operator.setitem),
)
_NOT_IN_PLACE = (operator.and_, operator.or_, operator.not_, operator.is_)  # named so for Python's sake


def changed_between(inputs: Iterable[fx.Node], first: fx.Node, last: fx.Node) -> fx.Node | None:
    """One of ``inputs`` whose memory something changes between two nodes of the graph, be it through a view."""
    values = {node: value(node) for node in inputs}
    node = first
    while node is not last:
        for base in written(node):
            changed = value(base)
            for found, held in values.items():
                if found is base or (changed is not None and held is not None and private.share_memory(changed, held)):
                    return found
        node = node.next
    return None


def switches_modes(node: fx.Node) -> bool:
    """Whether gradients, inference mode or autocast are switched on or off here, for what follows."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _SWITCHES


def switched_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether something between two nodes of the graph switches gradients, inference mode or autocast on or off."""
    while first is not last and not switches_modes(first):
        first = first.next
    return first is not last


_SWITCHES = (
    "_set_grad_enabled",
    *("_enter_inference_mode", "_exit_inference_mode"),
    *("_enter_autocast", "_exit_autocast"),
)


TRANSFORMED = "fxshard_transformed"
"""Key of ``node.meta``: a transform of ``torch.func`` is at work here. Operators of our own have no rules for it."""


def rewrite_nested(module: fx.GraphModule, rewrite: Callable[[fx.Graph], None]) -> fx.GraphModule:
    """Rewrite the captured graph, and those inside it: what ``torch.utils.checkpoint`` wraps is a graph of its own."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _mark_transformed(part.graph)
            rewrite(part.graph)
            part.graph.lint()
            part.recompile()
    return module


def _mark_transformed(graph: fx.Graph) -> None:
    """Dynamo puts down where each transform begins and ends."""
    depth = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        depth += name.endswith("_increment_nesting")
        if depth:
            node.meta[TRANSFORMED] = True
        depth -= name.endswith("_decrement_nesting")


@dataclass(frozen=True)
class Product:
    """A matrix product with weights: grouped by ``offsets``, or a dense one (None)."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    offsets: fx.Node | None = None
    bias: fx.Node | None = None


def grouped_product(node: Any) -> Product | None:
    """``torch._grouped_mm`` (``F.grouped_mm`` in Dynamo's graphs), the fallback of transformers, or fxshard's own."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    third = private.grouped_mm_offsets(node.target)
    if third is None or len(node.args) < 2:
        return None
    x, weight, offsets = node.args[0], node.args[1], argument(node, 2, third)
    bias, out_dtype = argument(node, 3, "bias"), argument(node, 4, "out_dtype")  # ours names its implementation there
    plain = not isinstance(bias, fx.Node) and out_dtype is None
    if not plain or not all(isinstance(arg, fx.Node) for arg in (x, weight, offsets)):
        return None
    if len(shape(x)) != 2 or len(shape(weight)) != 3:
        return None
    return Product(node, x, weight, offsets)  # type: ignore[arg-type]


def dense_product(node: Any) -> Product | None:
    """``F.linear``."""
    if call(node) != "linear":
        return None
    x, weight, bias = node.args[0], argument(node, 1, "weight"), argument(node, 2, "bias")
    return Product(node, x, weight, None, bias) if len(shape(weight)) == 2 else None


def grouped_products(graph: fx.Graph) -> Iterator[Product]:
    for node in graph.nodes:
        found = grouped_product(node)
        if found is not None:
            yield found


def stand_in(node: fx.Node, replaced: fx.Node) -> None:
    """Note on a new node where in the model it stands: where the one was that it replaces."""
    node.meta.update({key: replaced.meta[key] for key in _WHERE if key in replaced.meta})


_WHERE = ("nn_module_stack", "stack_trace", "source_fn_stack")


def place(node: fx.Node) -> str:
    """Where in the model a node stands, as a path of modules."""
    return private.module_path(node) or "the model itself"
