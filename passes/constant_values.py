"""The value of a node that depends on nothing but numbers, computed for real on the CPU.

Every operator that runs is checked while it runs: only those below count, which compute the same on every device, draw
no random numbers and leave nothing uninitialised. Whatever else takes part, the node is not taken for a constant.
Where sizes are open it is computed at some size, if that says what it is at all of them: see ``open_sizes``.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fxshard._torch import private
from fxshard.passes.calls import TRANSFORMED, value, written
from fxshard.passes.open_sizes import (
    check_lines,
    computed_sizes,
    is_open_size,
    line,
    shape_at,
    why_not_everywhere,
)

LARGEST = 2**28
"""Elements of the largest tensor that is computed."""

_EXACT = frozenset(
    (
        *("full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_full", "new_ones", "new_zeros"),
        *("arange", "eye", "scalar_tensor", "lift_fresh", "_to_copy", "clone", "detach", "alias"),
        *("view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "slice", "select", "permute", "transpose", "t"),
        *("unbind", "split", "cat", "stack", "repeat", "flip", "index"),
        *("eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "tril", "triu", "any", "all"),
        *("logical_and", "logical_or", "logical_not", "logical_xor"),
        *("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor"),
        *("add", "sub", "rsub", "mul", "neg", "abs", "minimum", "maximum", "clamp", "floor_divide", "remainder"),
        *("cumsum", "sum"),
    )
)
_EXACT_IF_WHOLE = frozenset(("arange", "cumsum", "sum", "floor_divide", "remainder"))
"""Exact for integers only: how floating-point numbers are rounded here depends on the device."""


class NotConstant(Exception):
    """Why a node is not known to have the same value in every step."""


def constant_value(node: fx.Node, graphs: Iterable[fx.Graph], beside: Sequence[fx.Node] | None = None) -> torch.Tensor:
    """What ``node`` computes, on the CPU. ``graphs`` is where something might write to it, its own graph among them.

    ``beside``: what it and others are made from that are computed for one purpose, at the same sizes.
    """
    sources = constant_sources(node)
    check_unwritten(sources, graphs)
    sizes, reason = computed_sizes(sources if beside is None else beside)
    if reason is not None:
        raise NotConstant(reason)
    for tensor in (tensor for source in sources if (tensor := value(source)) is not None):
        if math.prod(_shape_at(tensor, sizes)) > LARGEST:
            raise NotConstant(f"has more than {LARGEST} elements: too many to look at")
    return _run(sources, sizes)


def _shape_at(tensor: torch.Tensor, sizes: dict[fx.Node, int]) -> tuple[int, ...]:
    found = shape_at(tensor, sizes)
    if found is None:
        raise NotConstant("has a size that is computed from others")
    return found


def constant_sources(node: fx.Node) -> list[fx.Node]:
    """The node and all it is made from, in order."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            _check_call(source)
            waiting.extend(source.all_input_nodes)
    return sorted(found)


def _check_call(node: fx.Node) -> None:
    if is_open_size(node):
        return
    if node.op == "placeholder":
        raise NotConstant(f"depends on {private.input_name(node)}, an input of the graph")
    if node.op == "get_attr":
        raise NotConstant(f"depends on {node.target}, which the module holds and others may write to")
    made = node.meta.get("example_value")
    if node.op == "call_function" and not _is_torchs(node.target):
        raise NotConstant(f"depends on {node.name}, a call of {_name(node.target)}, which is not known to be pure")
    tensors = made if isinstance(made, tuple | list) else (made,)
    if node.meta.get(TRANSFORMED) or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise NotConstant(f"depends on {node.name}, which is not a plain tensor")


def _is_torchs(target: Any) -> bool:
    """Whether a function is one of torch's or of Python's operators; what it runs is checked when it does."""
    if isinstance(target, torch._ops.OpOverload):
        return True
    name = getattr(target, "__name__", "")
    return any(getattr(home, name, None) is target for home in (torch, operator))


# -- writes ----------------------------------------------------------------------------------------------------------


def check_unwritten(sources: list[fx.Node], graphs: Iterable[fx.Graph]) -> None:
    """No node may write to one of ``sources``, earlier or later or through a view."""
    held = [tensor for node in sources if (tensor := value(node)) is not None]
    for graph in graphs:
        for node in graph.nodes:
            for base in (*written(node), *(node.all_input_nodes if _hides_writes(node) else ())):
                changed = value(base)
                if changed is not None and any(private.share_memory(changed, each) for each in held):
                    raise NotConstant(f"may be written to by {node.name}")


_NAMES = "eq ne lt le gt ge and or xor invert getitem add radd sub rsub mul rmul neg abs"
_READING = {f"__{name}__" for name in _NAMES.split(" ")}
"""Methods that Dynamo calls by these names, and that write to nothing."""


def _hides_writes(node: fx.Node) -> bool:
    """Whether a call does not say what it writes to. A checkpointed region has a graph of its own that does."""
    if node.op == "call_method":
        return str(node.target).startswith("__") and str(node.target) not in _READING
    if node.op != "call_function" or private.calls_checkpointed(node):
        return False
    if private.written_arguments(node.target, node.args, node.kwargs) is not None:
        return False
    function = isinstance(node.target, types.FunctionType) and node.target.__module__.startswith("torch.")
    return not function and not isinstance(node.target, types.BuiltinFunctionType)


# -- evaluation ------------------------------------------------------------------------------------------------------


class _OnlyExact(private.OperatorObserver):
    def __init__(self, sizes: dict[fx.Node, int]) -> None:
        super().__init__()
        self._sizes = sizes
        self._lines: list[int] = []

    def before(self, operator: Any, args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        name = private.operator_name(operator) if isinstance(operator, torch._ops.OpOverload) else str(operator)
        if getattr(operator, "namespace", None) != "aten" or name not in _EXACT or private.is_mutable(operator):
            raise NotConstant(f"is computed by {name}, which is not known to give the same everywhere")

        def after(result: Any) -> None:
            if name in _EXACT_IF_WHOLE and result.is_floating_point():
                raise NotConstant(f"is computed by {name} of floating-point numbers")
            if self._sizes:
                self._lines.append(line(name, args, result))
                reason = why_not_everywhere(name, args, result) or check_lines(self._lines, self._sizes)
                if reason is not None:
                    raise NotConstant(reason)

        return after


def _run(sources: list[fx.Node], sizes: dict[fx.Node, int]) -> torch.Tensor:
    last_user = {argument: node for node in sources for argument in node.all_input_nodes}
    values: dict[fx.Node, Any] = dict(sizes)
    with private.as_a_compiler(), _OnlyExact(sizes):
        for node in sources:
            if node in sizes:
                continue
            try:
                values[node] = _call(node, values)
            except NotConstant:
                raise
            except Exception as error:
                raise NotConstant(f"cannot be computed on the CPU: {error}") from error
            for argument in node.all_input_nodes:
                if last_user[argument] is node:
                    del values[argument]  # large, some of them
    result = values[sources[-1]]
    expected = value(sources[-1])
    if expected is None or result.shape != _shape_at(expected, sizes) or result.dtype != expected.dtype:
        raise NotConstant("has another shape or dtype when it is computed")
    return result  # type: ignore[no-any-return]


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    def real(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return values[leaf]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    args: Any = map_aggregate(node.args, real)
    kwargs: Any = map_aggregate(node.kwargs, real)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "cpu"}
    if node.op == "call_method":
        if node.target == "cuda":
            return args[0]
        if node.target == "to":
            args = (args[0], *("cpu" if isinstance(arg, str) else arg for arg in args[1:]))
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _name(target: Any) -> str:
    return getattr(target, "__name__", str(target))
