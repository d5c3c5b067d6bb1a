"""What Dynamo knows while it hands a captured graph to a backend, and inputs that it has not seen."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxshard._compat.tracing import current_fake_mode


def inlines_modules() -> bool:
    """Whether Dynamo traces into modules and makes their parameters inputs of the graph. torch 2.11; always in 2.13."""
    from torch._dynamo import config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that one may ask no more
        return bool(getattr(config, "inline_inbuilt_nn_modules", True))


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that Dynamo writes into the graph as one node. torch 2.11, 2.13."""
    return torch.compiler.allow_in_graph(function)  # type: ignore[no-any-return]


def any_global_hook() -> bool:
    """Whether something is called with every module. torch 2.11, 2.13."""
    from torch.nn.modules.module import _has_any_global_hook

    return bool(_has_any_global_hook())


def does_more_than_compute() -> str | None:
    """What the captured code does beside computing tensors: it assigns to something that was there before, draws one of
    Python's random numbers. None if nothing. To be asked by a backend. torch 2.11, 2.13.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    output = InstructionTranslator.current_tx().output
    if output.random_calls:
        return "draws random numbers of Python's"
    for variable in output.side_effects._get_modified_vars():
        if not isinstance(variable.mutation_type, AttributeMutationNew | ValueMutationNew):
            where = getattr(variable, "source", None)
            return f"writes to {where.name if where is not None else variable}"
    return "has hooks on tensors" if output.side_effects.tensor_hooks else None


def graph_break(graph: fx.GraphModule) -> str | None:
    """Where and why Dynamo ended a graph early, None where it captured to the end. torch 2.11, 2.13."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    where = [f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack]
    return f"{where[-1] if where else 'unknown code'}: {reason.reason.splitlines()[0]}"


def graph_input_example(placeholder: fx.Node) -> Any:
    """The real value behind an input of a Dynamo graph: for a parameter, the parameter itself. torch 2.11, 2.13."""
    argument = placeholder.meta.get("grapharg")
    return argument.example if argument is not None else None


def is_static(value: torch.Tensor) -> bool:
    """Whether somebody has said that a tensor stays where it is. torch 2.11, 2.13."""
    return getattr(value, _STATIC, None) is not None


def another_input(like: fx.Node, tensor: torch.Tensor, path: Sequence[str], key: str) -> fx.Node | None:
    """Write an input for a tensor, at the place where its graph inserts. ``like`` is that of another module's in the
    same place: modules under ``path``, for whose last name stands ``key``. None if it was not reached so.

    torch 2.11, 2.13.
    """
    argument = like.meta.get("grapharg")
    source = _source_under(getattr(like, "_dynamo_source", None), path, key)
    if argument is None or source is None:
        return None
    fake = current_fake_mode().from_tensor(tensor, static_shapes=True)
    if is_static(argument.example):
        setattr(tensor, _STATIC, getattr(argument.example, _STATIC))
    node = like.graph.placeholder(re.sub(r"[^a-zA-Z0-9]+", "_", source.name))  # the name that Dynamo gives
    node.type = like.type
    node.meta.update(like.meta)
    node.meta["example_value"] = fake
    node.meta["grapharg"] = dataclasses.replace(argument, source=source, _example=tensor, fake_tensor=fake)
    node._dynamo_source = source  # type: ignore[attr-defined]
    return node


_STATIC = "_dynamo_static_input_type"


def _source_under(source: Any, path: Sequence[str], key: str) -> Any:
    """Where Dynamo finds what is under ``path``, with another last name."""
    chain = [source]
    while getattr(chain[-1], "base", None) is not None:
        chain.append(chain[-1].base)
    chain.reverse()
    modules = [
        at for at, each in enumerate(chain) if at > 0 and _name(chain[at - 1]).endswith("._modules") and _index(each)
    ]
    if len(modules) < len(path) or tuple(_index(chain[at]) for at in modules[: len(path)]) != tuple(path):
        return None
    at = modules[len(path) - 1]
    moved = dataclasses.replace(chain[at], index=key)
    for each in chain[at + 1 :]:
        moved = dataclasses.replace(each, base=moved)
    return moved


def _name(source: Any) -> str:
    return str(source.name) if source is not None else ""


def _index(source: Any) -> str | None:
    index = getattr(source, "index", None)
    return index if isinstance(index, str) else None
