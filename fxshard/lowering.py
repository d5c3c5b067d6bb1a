"""Segments to callables: each distinct structure is compiled once, however many layers repeat it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import fx

from fxshard import _compat
from fxshard.helpers.crew import Crew
from fxshard.helpers.known import Known
from fxshard.helpers.packing import compile_packed, example_inputs, packed
from fxshard.log import LOG
from fxshard.remembered.canonical import Unnamed, canonical

T = TypeVar("T")
BoxedCallable = Callable[[list[Any]], Any]
Key = tuple[str, Any]
"""A segment's structure, and where its symbolic sizes were traced."""


@dataclass(frozen=True)
class Compilations:
    """How much was compiled: stretches of compute, distinct ones among them, and graphs that Dynamo captured."""

    segments: int
    compiled: int
    captures: int
    layers_left_out: int = 0
    """Layers that were not traced through autograd, because they are like those that were (``trace_once``)."""
    layers_passed_by: int = 0
    """Layers that Dynamo did not trace either, because another module does the same to what it is called with."""


class SegmentCompiler:
    """Compiles segments and remembers them by structure: ops, arguments, shapes, strides and dtypes, but no names."""

    def __init__(self, lowering: str) -> None:
        self.lowering = lowering
        self.segments = 0
        self.compilations = 0
        self._compiled: dict[Key, BoxedCallable] = {}
        self._handed_out: dict[int, tuple[Key, fx.GraphModule]] = {}
        """What a crew was asked to compile, by the numbers of its jobs."""
        self._under: str | None = None
        """The circumstances in which segments are compiled now, if they can be told."""
        self._noted: dict[str, _compat.Generated] = {}
        """What Inductor's cache has for segments from earlier starts, by structure."""
        self._compiled_under: dict[str, str] = {}
        """The circumstances of segments that were compiled at this start, by structure."""

    @cached_property
    def _known(self) -> Known:
        return Known()

    def look_around(self) -> None:
        """Note under which circumstances the segments that follow are compiled."""
        self._under = _circumstances() if self.lowering == "inductor" else None

    @property
    def asked_inductor(self) -> bool:
        """Whether anything was compiled that an earlier start had not noted."""
        return bool(self._compiled_under)

    def take(self, noted: Mapping[str, _compat.Generated]) -> None:
        """Use what an earlier start has noted, where circumstances are the same."""
        self._noted.update(noted)

    def noted(self, segments: Iterable[fx.GraphModule]) -> dict[str, _compat.Generated]:
        """What Inductor's cache has for segments that were compiled, for the next start."""
        found = {name: self._note(name) for name in sorted({structure(segment) for segment in segments})}
        return {name: note for name, note in found.items() if note is not None}

    def _note(self, name: str) -> _compat.Generated | None:
        if name not in self._compiled_under:
            return self._noted.get(name)
        return _compat.generated(self._compiled[name, None], self._compiled_under[name])

    def __call__(self, segment: fx.GraphModule) -> BoxedCallable:
        self.segments += 1
        key = _key(segment)
        if key not in self._compiled:
            self._compile(key, segment)
        return self._compiled[key]

    def hand_out(self, crew: Crew, phases: Iterable[Iterable[fx.GraphModule]]) -> None:
        """Let a crew compile what is new among the segments of ``phases``, in the order in which these will run, and
        wait for nothing.

        What it compiles is in Inductor's cache when it has finished, and is there at once when it is called for.
        """
        circumstances = _compat.compile_circumstances()
        if circumstances is None:
            return
        crew.withdraw_unwanted()
        for segments in phases:
            new = self._new(segments)
            for key in sorted(new, key=lambda key: -_length(new[key])):  # the longest first
                data = packed(new[key])
                if data is not None:
                    number = crew.publish(partial(compile_packed, data, circumstances))
                    self._handed_out[number] = key, new[key]

    def _new(self, segments: Iterable[fx.GraphModule]) -> dict[Key, fx.GraphModule]:
        """Those that nobody has compiled, or was asked to."""
        new: dict[Key, fx.GraphModule] = {}
        old = {*self._compiled, *(key for key, _ in self._handed_out.values())}
        for segment in segments:
            key = _key(segment)
            if key not in old and key[1] is None and key[0] not in self._known and _worth_compiling(segment):
                new.setdefault(key, segment)  # the cache knows nodes by name, and the first will be asked for
        return new

    def finish(self, crew: Crew, segments: Iterable[fx.GraphModule]) -> None:
        """Do what a crew is too small for, or too late, and wait until it has done its part of ``segments``, and all
        else that it was asked for.
        """
        if self._handed_out:
            _compat.hash_torch()  # which looking into the cache begins with: others are at work now
        for number in reversed(self._handed_out):
            key, segment = self._handed_out[number]
            if len(crew.open.intersection(self._handed_out)) <= crew.present():
                break  # each of what is left is somebody's
            if number in crew.open:
                self._compile(key, segment)
                crew.withdraw(number)
        wanted = {_key(segment) for segment in segments}
        crew.finish(but=[number for number, (key, _) in self._handed_out.items() if key not in wanted])

    def _compile(self, key: Key, segment: fx.GraphModule) -> None:
        self.compilations += 1
        started = time.perf_counter()
        constants = segment.graph.find_nodes(op="get_attr")  # their structure is this process's
        self._compiled[key] = self._generated(key, segment) or self._lower(key, segment)
        if self.lowering == "inductor" and not constants:
            self._known.add(key[0])
        seconds = time.perf_counter() - started
        LOG.debug("segment %d: %d nodes, %s, %.2f s", self.segments, _length(segment), self.lowering, seconds)

    def _generated(self, key: Key, segment: fx.GraphModule) -> BoxedCallable | None:
        """What an earlier start has left for a segment, if it is there and circumstances are as they were."""
        noted = self._noted.get(key[0])
        if noted is None or noted.under != self._under:
            return None
        try:
            return _compat.load_generated(noted, example_inputs(segment))
        except Exception as error:  # of any kind, as what is wrong with a file may be: it is compiled as at first
            LOG.debug("generated code cannot be read, and is made again: %s: %s", type(error).__name__, error)
            return None

    def _lower(self, key: Key, segment: fx.GraphModule) -> BoxedCallable:
        if self.lowering == "eager" or not _worth_compiling(segment):
            return interpreted(segment)
        segment = _copy(segment)  # a compiler writes to it, and it is known by its structure, by several layers perhaps
        if self._under is not None and key[1] is None:
            self._compiled_under[key[0]] = self._under
        return _compat.inductor_compile(segment, example_inputs(segment))


def _circumstances() -> str | None:
    """All that compiling a segment depends on beside it, as a digest; None where it cannot be told."""
    try:
        said = _compat.compiled_under()
        return hashlib.sha256(canonical(said).encode()).hexdigest() if said is not None else None
    except Unnamed:
        return None


def interpreted(segment: fx.GraphModule) -> BoxedCallable:
    """A segment as it stands, operator by operator."""
    forward = fx.GraphModule(segment, segment.graph).forward

    def run(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()
        return forward(*values)

    return run


def _key(segment: fx.GraphModule) -> Key:
    # What a compiler assumed about symbolic sizes is noted where they were traced, and holds only there.
    values = [node.meta.get("val") for node in segment.graph.find_nodes(op="placeholder")]
    return structure(segment), next((env for env in map(_compat.shape_environment, values) if env is not None), None)


def _copy(segment: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in segment.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return _compat.graph_module(segment, graph)


def _length(segment: fx.GraphModule) -> int:
    return len(segment.graph.nodes)


def once_each(splits: Mapping[T, fx.GraphModule]) -> dict[T, fx.GraphModule]:
    """Split graphs in which segments that compute the same are the same: the first of them, which is compiled."""
    first: dict[str, fx.GraphModule] = {}

    def shared(split: fx.GraphModule) -> fx.GraphModule:
        found: dict[str, fx.GraphModule] = {}
        for call in split.graph.find_nodes(op="call_module"):
            segment = split.get_submodule(str(call.target))
            assert isinstance(segment, fx.GraphModule)
            found[str(call.target)] = first.setdefault(structure(segment), segment)
        return _compat.graph_module(found, split.graph)

    return {name: shared(split) for name, split in splits.items()}


def structure(segment: fx.GraphModule) -> str:
    """A digest that is equal for segments that compute the same thing on the same kinds of tensors."""
    number: dict[fx.Node, int] = {}
    lines: list[str] = []
    for node in segment.graph.nodes:
        number[node] = len(number)
        args = fx.map_arg((node.args, node.kwargs), lambda arg: f"%{number[arg]}")
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        if node.op == "get_attr":  # a constant: equal only to itself
            target = f"constant {id(getattr(segment, str(node.target)))}"
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
