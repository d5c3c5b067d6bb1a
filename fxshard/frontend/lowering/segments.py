"""Segments to callables: each distinct structure is compiled once, however many layers repeat it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxshard._torch import private
from fxshard._torch.log import LOG

BoxedCallable = Callable[[list[Any]], Any]
Key = tuple[str, Any]
"""A segment's structure, and where its symbolic sizes were traced."""


class SegmentCompiler:
    """Compiles segments and remembers them by structure: ops, arguments, shapes, strides and dtypes, but no names."""

    def __init__(self, lowering: str) -> None:
        self.lowering = lowering
        self.segments = 0
        self.compilations = 0
        self._compiled: dict[Key, BoxedCallable] = {}

    def __call__(self, segment: fx.GraphModule) -> BoxedCallable:
        self.segments += 1
        key = _key(segment)
        if key not in self._compiled:
            self.compilations += 1
            started = time.perf_counter()
            self._compiled[key] = self._lower(segment)
            seconds, length = time.perf_counter() - started, len(segment.graph.nodes)
            LOG.debug("segment %d: %d nodes, %s, %.2f s", self.segments, length, self.lowering, seconds)
        return self._compiled[key]

    def _lower(self, segment: fx.GraphModule) -> BoxedCallable:
        if self.lowering == "eager" or not _worth_compiling(segment):
            return interpreted(segment)
        segment = private.copied(segment)  # a compiler writes to it, and several layers may share it
        return private.inductor_compile(segment, example_inputs(segment))


def example_inputs(segment: fx.GraphModule) -> list[Any]:
    """Values like those that the segment is called with. Layers that were folded share theirs: they get their own, or a
    compiler would take two inputs for the same memory.
    """
    values: list[Any] = []
    for node in segment.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        seen = isinstance(value, torch.Tensor) and any(value is other for other in values)
        values.append(private.another_like(value) if seen else value)
    return values


class _Interpreter(fx.Interpreter):
    """Runs views as reshapes, which copy where they must: some kernels of torch (the gradient of softplus, batch norms)
    give results in other strides than the fake tensors that the graph was traced with.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target
        return super().call_function(target, args, kwargs)


def interpreted(segment: fx.GraphModule) -> BoxedCallable:
    """A segment as it stands, operator by operator. A value is dropped after the operator that reads it last."""
    interpreter = _Interpreter(segment)

    def run(args: list[Any]) -> Any:
        try:
            return interpreter.boxed_run(args)
        finally:
            interpreter.env.clear()  # which has the results

    return run


def _key(segment: fx.GraphModule) -> Key:
    # What a compiler assumed about symbolic sizes is noted where they were traced, and holds only there.
    values = [node.meta.get("val") for node in segment.graph.find_nodes(op="placeholder")]
    return structure(segment), next((env for env in map(private.shape_environment, values) if env is not None), None)


def structure(segment: fx.GraphModule) -> str:
    """A digest that is equal for segments that compute the same thing on the same kinds of tensors."""
    number: dict[fx.Node, int] = {}
    lines: list[str] = []
    for node in segment.graph.nodes:
        number[node] = len(number)
        args = fx.map_arg((node.args, node.kwargs), lambda arg: f"%{number[arg]}")
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        if node.op == "get_attr":
            target = f"constant {private.constant_identity(getattr(segment, str(node.target)))}"
        value = _describe(node.meta.get("val")) if node.op == "placeholder" else ""
        lines.append(f"{node.op} {target} {args} {value}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}{value.requires_grad}"
    return f"{type(value).__name__} {value}"


def _worth_compiling(segment: fx.GraphModule) -> bool:
    """Not where nothing is computed, nor for a lookup alone, which is one kernel of torch's anyway."""
    calls = [node for node in segment.graph.nodes if node.op == "call_function"]
    return bool(calls) and not (len(calls) == 1 and calls[0].target is torch.ops.aten.embedding.default)
