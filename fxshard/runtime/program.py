"""A program: a scheduled, lowered graph as a flat list of instructions over registers.

Running it is a loop over callables. A value is dropped from its register by the instruction that uses it last, and is
handed to a compiled segment in a list which that segment empties: activations die inside the segment that reads them
last, not behind it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxshard import _compat
from fxshard.events import Event, Kind, Phase, event_of
from fxshard.inspect.progress import Done, long_work
from fxshard.lowering import BoxedCallable, SegmentCompiler
from fxshard.profile import Key
from fxshard.runtime.engine import Engine
from fxshard.runtime.host_values import changes_on_host
from fxshard.runtime.replay import Take


@dataclass(frozen=True)
class Instruction:
    """Call ``run`` with the values of ``inputs``; put what it returns into ``outputs``; forget ``dead``."""

    run: Callable[[list[Any]], Any]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...] | None
    dead: tuple[int, ...]
    label: str
    key: Key | None = None
    """Under what a profile records it."""


class Program:
    """One phase of a step, ready to run. It takes its arguments in a list, and empties it."""

    def __init__(
        self,
        graph: fx.GraphModule,
        phase: Phase,
        engine: Engine,
        arena_bytes: int,
        compiler: SegmentCompiler,
        before_first_run: Callable[[], None] | None = None,
        owner: object = None,
        carries: Mapping[int, Event] | None = None,
        visible: int | None = None,
    ) -> None:
        self.phase = phase
        self.visible = visible
        """How many of its results are the caller's; the others are saved for backward. None: all of them."""
        self.takes: dict[Hashable, Take] = {}
        """What was captured of it, by what it found when it started."""
        self.captures = 0
        self.changes_on_host = changes_on_host(graph, engine.device)
        self.owner = owner
        self.runs = 0
        self._before_first_run = before_first_run
        self._engine = engine
        self._arena_bytes = arena_bytes
        self._carries = carries or {}
        with long_work(f"compiling {phase}") as report:
            self._compile(graph, compiler, report)

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        with contextlib.ExitStack() as frame:
            if self._engine.observed:
                frame.enter_context(_compat.no_observers())
            if torch.is_inference_mode_enabled():
                # Memory that outlives this call must not be made in inference mode: training could not write to it.
                frame.enter_context(torch.inference_mode(False))
                frame.enter_context(torch.no_grad())
            return self._run(args)

    def _run(self, args: list[Any]) -> tuple[Any, ...]:
        engine = self._engine
        if self._before_first_run is not None:
            self._before_first_run()
            self._before_first_run = None
        engine.begin(self.phase, self._arena_bytes, self.owner, self._carries)
        return self.run_through(args) if engine.replays is None else engine.replays.run(engine, self, args)

    def run_through(self, args: list[Any]) -> tuple[Any, ...]:
        """Run every instruction; what fails half-way leaves nothing behind."""
        try:
            return self.execute(args)
        except BaseException:
            self._engine.abort()
            raise

    def execute(self, args: list[Any]) -> tuple[Any, ...]:
        """The instructions, one after the other."""
        engine = self._engine
        instructions = self._instructions if engine.gradients.synchronises else self._accumulating
        recorder = engine.recorder
        registers: list[Any] = [*args, *[None] * (self._registers - len(args))]
        args.clear()
        for i in self.unused_inputs:
            registers[i] = None
        ranges = _compat.profiling()
        for instruction in instructions:
            values = [registers[i] for i in instruction.inputs]
            for i in instruction.dead:
                registers[i] = None
            if recorder is not None:
                results = recorder.run(instruction.key, instruction.run, values)
            elif ranges:
                with torch.profiler.record_function(instruction.label):
                    results = instruction.run(values)
            else:
                results = instruction.run(values)
            if instruction.outputs is not None:
                for register, result in zip(instruction.outputs, results, strict=True):
                    if register is not None:
                        registers[register] = result
                del results
        engine.end()
        self.runs += 1
        return tuple(registers[i] if i is not None else None for i in self._returns)

    def boxed(self) -> BoxedCallable:
        """The program as AOTAutograd wants it: a function that says it takes its arguments in a list."""

        def run(args: list[Any]) -> tuple[Any, ...]:
            return self(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _compile(self, module: fx.GraphModule, compiler: SegmentCompiler, report: Done) -> None:
        graph = module.graph
        register: dict[fx.Node, int] = {}
        inputs = graph.find_nodes(op="placeholder")
        for node in inputs:
            register[node] = len(register)
        calls = [node for node in graph.nodes if event_of(node) is not None or node.op == "call_module"]
        unpacked = {call: _unpacking(call, register) for call in calls}
        last_use = _last_uses(calls, graph.output_node())

        self._instructions: list[Instruction] = []
        self._accumulating: list[Instruction] = []
        """The same inside ``no_sync``: gradients are kept where they would be reduced."""
        passed = 0  # events that are no gathers
        for call in calls:
            report(len(self._instructions), len(calls))
            event = event_of(call)
            segment = compiler(_segment(module, call)) if event is None else None
            run = segment if segment is not None else self._bind(call, event)  # type: ignore[arg-type]
            args = [node for node in call.args if isinstance(node, fx.Node)]
            instruction = Instruction(
                run=run,
                inputs=tuple(register[node] for node in args),
                outputs=unpacked[call],
                dead=tuple(register[node] for node in dict.fromkeys(args) if last_use.get(node) is call),
                label=f"fxshard {self.phase} {call.target if event is None else f'{event.kind} {event.bucket}'}",
                key=self._key(event, passed),
            )
            self._instructions.append(instruction)
            self._accumulating += self._without_reducing(instruction, event)
            passed += event is not None and event.kind is not Kind.UNSHARD
        returned = graph.output_node().args[0]
        assert isinstance(returned, (tuple, list))
        self._returns = tuple(register[node] if isinstance(node, fx.Node) else None for node in returned)
        self.unused_inputs = tuple(register[node] for node in inputs if not node.users)
        self._registers = len(register)

    def _without_reducing(self, instruction: Instruction, event: Event | None) -> list[Instruction]:
        """What stands for an instruction inside ``no_sync``."""
        if event is None or event.kind not in (Kind.REDUCE, Kind.ALL_REDUCE, Kind.FINISH):
            return [instruction]
        if event.kind is Kind.ALL_REDUCE:
            return []
        index = event.bucket_index
        act = self._engine.gradients.accumulate if event.kind is Kind.REDUCE else self._engine.gradients.put_back
        what = Kind.ACCUMULATE if event.kind is Kind.REDUCE else event.kind
        return [replace(instruction, run=lambda _: act(index), label=f"{what} {event.bucket}")]

    def _key(self, event: Event | None, passed: int) -> Key | None:
        if event is None:
            return "compute", str(self.phase), passed
        collective = {Kind.UNSHARD: "gather", Kind.REDUCE: "reduce"}.get(event.kind)
        return None if collective is None else (collective, event.bucket, 0)

    def _bind(self, call: fx.Node, event: Event) -> BoxedCallable:
        """The engine's action for a runtime node."""
        engine, index, slot = self._engine, event.bucket_index, event.slot
        gradients = engine.gradients
        zeros = call.kwargs.get("zeros", ())
        actions: dict[Kind, Callable[[list[Any]], Any]] = {
            Kind.UNSHARD: lambda _: engine.unshard(index, slot, event.copies),
            Kind.WAIT: lambda _: engine.wait(index, slot, event.copies),
            Kind.RESHARD: lambda _: engine.reshard(index),
            Kind.GRAD: lambda _: gradients.grad(index, slot, zeros),  # type: ignore[arg-type]
            Kind.REDUCE: lambda _: gradients.reduce(index),
            Kind.ALL_REDUCE: lambda _: gradients.all_reduce(index),
            Kind.FINISH: lambda _: gradients.finish(index),
        }
        return actions[event.kind]


def _unpacking(call: fx.Node, register: dict[fx.Node, int]) -> tuple[int | None, ...] | None:
    """A register for each element of the call's result that something uses; None in place of the others."""
    taken: dict[int, int] = {}
    for user in call.users:
        position = user.args[1] if user.target is operator.getitem else None
        assert isinstance(position, int) and position not in taken, f"{call} must be unpacked once, into {user}"
        taken[position] = register[user] = len(register)
    return tuple(taken.get(i) for i in range(len(call.meta["val"]))) if taken else None


def _last_uses(calls: list[fx.Node], output: fx.Node) -> dict[fx.Node, fx.Node]:
    last: dict[fx.Node, fx.Node] = {}
    for call in calls:
        for node in call.all_input_nodes:
            last[node] = call
    for node in output.all_input_nodes:
        last[node] = output
    return last


def segments(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The stretches of compute of a graph that was split, in order."""
    return [_segment(module, call) for call in module.graph.find_nodes(op="call_module")]


def _segment(module: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    segment = module.get_submodule(str(call.target))
    assert isinstance(segment, fx.GraphModule)
    return segment
