"""What torch knows of a graph's nodes: their operators, schemas and constants."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx


def operator_of(node: fx.Node) -> torch._ops.OpOverload | None:
    """The torch operator that a node calls, if it calls one. torch 2.11, 2.13."""
    return node.target if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) else None


def operator_name(operator: torch._ops.OpOverload) -> str:
    """Name without namespace and overload: ``embedding``. torch 2.11, 2.13."""
    return operator._opname


@functools.cache
def returns_view(operator: torch._ops.OpOverload) -> bool:
    """Whether the schema says that a result shares memory with an argument it does not write to. torch 2.11, 2.13."""
    returns = operator._schema.returns
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


@functools.cache
def is_mutable(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator writes to one of its arguments. torch 2.11, 2.13."""
    return operator._schema.is_mutable


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """The arguments that an operator writes to, by its schema (by any, if no overload is named); None if the target is
    no operator. torch 2.11, 2.13."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    elif isinstance(target, torch._ops.OpOverload):
        overloads = [target]
    else:
        return None
    arguments = [pair for overload in overloads for pair in enumerate(overload._schema.arguments)]
    places = {(i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write}
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in sorted(places)]


def draws_a_random_number(node: fx.Node) -> bool:
    """Whether running a node moves a random number generator. torch 2.11, 2.13.

    Operators for attention have a dropout of their own, and are marked for it even where it is 0.
    """
    operator = operator_of(node)
    return operator is not None and is_random(operator) and _argument(node, operator, "dropout_p") != 0.0


def is_random(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator may draw random numbers. The partitioner saves a generator's state for one that is computed
    twice, even where its dropout is 0. torch 2.11, 2.13."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def _argument(node: fx.Node, operator: torch._ops.OpOverload, name: str) -> Any:
    """What a node passes for an operator's argument; None where it has none of that name."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            given = node.args[position] if position < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    return None


def grouped_mm_offsets(target: Any) -> str | None:
    """The name of the third argument, if ``target`` is a grouped matrix product: torch's, that of transformers, ours.

    ``torch._grouped_mm``: torch 2.11, 2.13. ``F.grouped_mm``, which calls it, is what Dynamo traces through.
    """
    if target is torch._grouped_mm or target is torch.nn.functional.grouped_mm:
        return "offs"
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    if isinstance(packet, torch._ops.OpOverloadPacket):
        return _GROUPED_PRODUCTS.get(packet._qualified_op_name)
    return None


_GROUPED_PRODUCTS = {
    "aten::_grouped_mm": "offs",
    "transformers::grouped_mm_fallback": "offs",
    "fxshard::grouped_product": "offsets",
}


def calls_checkpointed(node: fx.Node) -> bool:
    """Whether a node runs a checkpointed region. It is given the region's graph, then that graph's inputs.

    torch 2.11, 2.13.
    """
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "tag_activation_checkpoint"


def chooses_attention(node: fx.Node) -> bool:
    """Whether a node restricts the kernels for attention: ``torch.nn.attention.sdpa_kernel``. torch 2.11, 2.13."""
    return node.op == "call_function" and "sdpa_kernel" in getattr(node.target, "__name__", "")


def constants(graph: fx.GraphModule) -> int:
    """How many tensors are part of a captured graph. AOTAutograd makes them its first inputs. torch 2.11, 2.13."""
    named = [*graph.named_parameters(remove_duplicate=False), *graph.named_buffers(remove_duplicate=False)]
    return len(named)


def constant_identity(value: Any) -> str:
    """What is equal for constants of a graph that can take each other's place: small ones by value, others are equal
    only to themselves. A constant is known to a tracer by a fake tensor, which may have the value. torch 2.11, 2.13.
    """
    real = value if type(value) is torch.Tensor else getattr(value, "constant", None)
    if not isinstance(real, torch.Tensor) or real.device.type != "cpu" or real.numel() > _SMALL_CONSTANT:
        return f"at {id(value)}"
    return f"{real.dtype}{tuple(real.shape)}{real.stride()}{value.device} {real.tolist()!r}"


_SMALL_CONSTANT = 64
