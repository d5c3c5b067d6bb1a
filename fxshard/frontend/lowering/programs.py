"""From a scheduled step to programs: split at the events, compiled by segments, bound to an engine."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxshard._torch import private
from fxshard._torch.errors import CaptureError, FxshardError
from fxshard._torch.progress import long_work
from fxshard.frontend.lowering.segments import SegmentCompiler
from fxshard.kernels.compile_ahead import compile_ahead
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.passes.split_segments import split_segments
from fxshard.passes.stages import Scheduled
from fxshard.runtime.engine import Engine
from fxshard.runtime.program import Instruction, Lowered, Program
from fxshard.schedule.events import OF_HOST, OF_MODEL, Event, Kind, Phase, event_of
from fxshard.schedule.observe import Observer
from fxshard.schedule.profile import key_of

Programs = Mapping[Phase, Lowered]


def lower(
    scheduled: Scheduled,
    plan: ShardingPlan,
    compiler: SegmentCompiler,
    device: torch.device,
    observer: Observer | None = None,
) -> Programs:
    """Compile the segments of every phase for ``device``. Modes of the caller do not reach the compiler."""
    lowered: dict[Phase, Lowered] = {}
    if compiler.lowering == "inductor":
        compile_ahead(scheduled.graphs.values(), device)
    for phase, graph in scheduled.graphs.items():
        split = _split(graph, phase, plan, observer)
        try:
            with private.as_a_compiler():
                lowered[phase] = _lower(split, phase, scheduled, compiler, device)
        except FxshardError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the {phase} graph was captured and scheduled, but could not be compiled: "
                f"{type(error).__name__}: {error}\n"
                'Compile with fxshard.compile(..., lowering="eager") to see whether Inductor is the cause.'
            ) from error
        if observer is not None:
            so_far = "%s: lowered by %s; so far %d segments of the model, %d of them compiled"
            observer.say(so_far, phase, compiler.lowering, compiler.segments, compiler.compilations)
    return lowered


def bind(lowered: Programs, engine: Engine, before_first_run: Callable[[], None]) -> dict[Phase, Program]:
    """Programs that run on ``engine``. ``before_first_run`` is called before the first collective of a step."""
    owner = object()
    return {
        phase: Program(each, engine, before_first_run if phase is not Phase.BACKWARD else None, owner)
        for phase, each in lowered.items()
    }


def _split(graph: fx.GraphModule, phase: Phase, plan: ShardingPlan, observer: Observer | None) -> fx.GraphModule:
    watch = observer.begin(phase, "split_segments", graph) if observer is not None else None
    split = split_segments(graph, plan.context(phase, observer))
    if watch is not None:
        watch.done(split)
    return split


def _lower(
    split: fx.GraphModule, phase: Phase, scheduled: Scheduled, compiler: SegmentCompiler, device: torch.device
) -> Lowered:
    graph = split.graph
    inputs = graph.find_nodes(op="placeholder")
    register = {node: i for i, node in enumerate(inputs)}
    calls = [node for node in graph.nodes if event_of(node) is not None or node.op == "call_module"]
    unpacked = {call: _unpacking(call, register) for call in calls}
    last_use = _last_uses(calls, graph.output_node())
    instructions: list[Instruction] = []
    passed = 0  # events that are no gathers
    with long_work(f"compiling {phase}") as report:
        for call in calls:
            report(len(instructions), len(calls))
            event = event_of(call)
            own = event is not None and event.kind in OF_MODEL
            args = call.all_input_nodes if own else [node for node in call.args if isinstance(node, fx.Node)]
            instructions.append(
                Instruction(
                    segment=collective(call) if own else compiler(_segment(split, call)) if event is None else None,
                    event=event,
                    inputs=tuple(register[node] for node in args),
                    outputs=unpacked[call],
                    dead=tuple(register[node] for node in dict.fromkeys(args) if last_use.get(node) is call),
                    label=f"fxshard {phase} {_name(call, event)}",
                    key=key_of(event, phase, passed),
                    zeros=call.kwargs.get("zeros", ()),  # type: ignore[arg-type]
                    needs=call.kwargs.get("needs", ()),  # type: ignore[arg-type]
                )
            )
            passed += event is not None and event.kind is not Kind.UNSHARD
    returned = graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    forward = phase is Phase.FORWARD
    return Lowered(
        phase=phase,
        instructions=tuple(instructions),
        registers=len(register),
        returns=tuple(register[node] if isinstance(node, fx.Node) else None for node in returned),
        unused_inputs=tuple(register[node] for node in inputs if not node.users),
        arena_bytes=scheduled.memory.bytes,
        visible=scheduled.outputs if forward else None,
        changes_on_host=changes_on_host(split, device),
        carries=_carries(scheduled) if forward else {},
        host_bytes=scheduled.schedule.offloaded_bytes if forward else 0,
    )


def _name(call: fx.Node, event: Event | None) -> str:
    return str(call.target) if event is None else f"{event.kind} {event.op or event.bucket}"


def _carries(scheduled: Scheduled) -> dict[int, Event]:
    """The gathers that an optimizer step starts for the next forward."""
    carried = scheduled.schedule.of(Kind.UNSHARD, phase=Phase.OPTIMIZER)
    return {event.bucket_index: event for _, event in carried}


def _unpacking(call: fx.Node, register: dict[fx.Node, int]) -> tuple[int | None, ...] | None:
    """A register for each element of the call's result that something uses; None in place of the others."""
    event = event_of(call)
    if event is not None and event.kind is not Kind.RELEASE and event.kind in (*OF_MODEL, *OF_HOST):  # one, as it is
        register[call] = len(register)
        return (register[call],)
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


def _segment(module: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    segment = module.get_submodule(str(call.target))
    assert isinstance(segment, fx.GraphModule)
    return segment


def collective(node: fx.Node) -> Callable[[list[Any]], tuple[Any]]:
    """Calls the operator of a node with the values of ``node.all_input_nodes``, and gives its one result."""
    call, args, kwargs = node.target, node.args, node.kwargs
    assert callable(call)
    inputs = node.all_input_nodes

    def run(values: list[Any]) -> tuple[Any]:
        given = dict(zip(inputs, values, strict=True))
        values.clear()
        return (call(*fx.map_arg(args, given.__getitem__), **fx.map_arg(kwargs, given.__getitem__)),)

    return run


def changes_on_host(module: fx.GraphModule, device: torch.device) -> bool:
    """Whether a program draws random numbers on another device than its own, or copies something there.

    A captured kernel would go on with the number that it was given, and the copy be read before it is made. All else
    that is computed there is computed from constants: with inputs on the CPU nothing is captured.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    return any(_changes(node, device) for graph in graphs for node in graph.nodes)


def _changes(node: fx.Node, device: torch.device) -> bool:
    made = _devices(node)
    # What has a result on the device runs there, also attention, which may return its random state on the host.
    if node.op != "call_function" or node.target is operator.getitem or not made or device in made:
        return False
    called = private.operator_of(node)
    random = called is None or torch.Tag.nondeterministic_seeded in called.tags
    return random or any(device in _devices(given) for given in node.all_input_nodes)


def _devices(node: fx.Node) -> set[torch.device]:
    return {value.device for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)}
