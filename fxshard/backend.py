"""The ``torch.compile`` backend: from a captured graph to programs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxshard import _compat
from fxshard.compiled import CompiledGraphs
from fxshard.config import Options
from fxshard.elsewhere import start, warm_up
from fxshard.errors import CaptureError, ConfigError
from fxshard.events import Event, Kind, Phase
from fxshard.fused.ahead import compile_ahead
from fxshard.garbage import make_old, no_garbage_collection
from fxshard.helpers.crew import dismiss, hired
from fxshard.inspect.observe import Observer, observer
from fxshard.inspect.record import record, resident_bytes
from fxshard.inspect.schedule import Schedule
from fxshard.passes.context import GRADS, PARAM, ParamRef, PassContext
from fxshard.passes.pipeline import before_autograd, before_partition, chosen, schedule
from fxshard.passes.run import blaming
from fxshard.passes.split_segments import split_segments
from fxshard.repetition.abridged import Abridged, abridge
from fxshard.repetition.periods import Unrepeatable
from fxshard.runtime.agreement import COMMUNICATION
from fxshard.runtime.program import Program, segments
from fxshard.sharding import Sharding, sharding_of, unsharded
from fxshard.variants import Variants


def fxshard_backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """``torch.compile(model, backend="fxshard")``. A model that ``fxshard.shard`` took apart runs sharded."""
    shardings = {id(found[0]): found[0] for found in map(sharding_of, graph_inputs(graph)) if found is not None}
    if len(shardings) > 1:
        raise ConfigError("one graph uses parameters of two sharded models; shard them together or compile them apart")
    if shardings:
        (sharding,) = shardings.values()
        if options:
            raise ConfigError(
                "this model was sharded with its options; give them to fxshard.shard, not to torch.compile"
            )
        return backend_of(sharding)(graph, example_inputs)
    return Backend(unsharded(Options.from_dict(options), _device(example_inputs)))(graph, example_inputs)


Lower = Callable[[fx.GraphModule], Callable[..., Any]]


class Backend:
    """Compiles every graph that Dynamo captures for one sharded model, and keeps what it emitted.

    ``lower`` turns a scheduled graph into what runs; planning replaces it, since nothing is to run.
    """

    def __init__(self, sharding: Sharding, lower: Lower | None = None) -> None:
        self.sharding = sharding
        self.lower = lower
        self.graphs: dict[str, fx.GraphModule] = {}
        self.schedules: dict[str, Schedule] = {}
        self.emitted: list[Schedule] = []
        self.captures = 0
        self.layers_left_out = 0
        """Layers that were not traced through autograd, being like those that were."""
        self.compiled = CompiledGraphs()
        self.observer: Observer | None = None
        """Who watches the graph that is being compiled, where somebody asked for it."""
        self.report: Callable[[str], None] = lambda stage: None
        """Called when a stage begins: ``differentiating``, ``partitioning``, ``scheduling``."""
        self.used: set[ParamRef] = set()
        """Parameters that some graph uses."""
        self.breaks: list[str] = []
        """Where and why graphs ended before the model did."""
        self.allows_breaks = False
        self.one_graph = False
        """Whether Dynamo captures the whole model at once, so that a graph always gets the same parameters."""
        self.buffers: Mapping[str, torch.Tensor] = {}
        """The model's buffers by name."""

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        run = self._compile_captured(graph, example_inputs)
        make_old()  # Dynamo has garbage collected next
        return self.compiled.add(run) if self.sharding.plans else run  # without parameters there is nothing to let go

    def _compile_captured(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.captures += 1
        broken = _compat.graph_break(graph)
        if broken is not None:
            self._note_break(broken)
        refs = self.refs(graph)
        graph = self.before_autograd(graph, refs)
        if self.one_graph or not any(refs):
            return self._compile_whole(refs, graph, example_inputs)
        again = _copy(graph)  # before AOTAutograd has worked on it

        def another(args: Sequence[Any]) -> Callable[..., Any]:
            self.observer = observer()
            return self.compile(Capture(self, [self._ref(value) for value in args], again), _copy(again), args)

        first = self.compile(Capture(self, refs, graph), graph, example_inputs)
        return Variants(first, tuple(refs), self._ref, another)

    def _compile_whole(
        self, refs: list[ParamRef | None], graph: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile the graph of a model; its repeated layers go through autograd once, if they can."""
        if self.one_graph and self.sharding.options.trace_once and torch.is_grad_enabled():
            names = self._input_names(graph, refs)
            abridged = abridge(graph, names, example_inputs, self._decompositions(), self.rewrite_joint)
            try:
                if abridged is not None:
                    compiled = self.compile(Capture(self, refs, abridged=abridged), abridged.graph, example_inputs)
                    self.layers_left_out += abridged.left_out
                    return compiled
            except Unrepeatable:
                pass  # known before anything was scheduled
        return self.compile(Capture(self, refs, graph), graph, example_inputs)

    def compile(self, capture: Capture, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Send a captured graph through AOTAutograd, which hands what it makes to ``capture``."""
        self.used.update(ref for ref in capture.refs if ref is not None)
        self.report("differentiating")
        return _compat.aot_autograd(
            fw_compiler=capture.compile_forward,
            bw_compiler=capture.compile_backward,
            inference_compiler=capture.compile_evaluation,
            partition_fn=capture.partition,
            decompositions=self._decompositions(),
        )(graph, example_inputs)

    def rewrite_joint(self, joint: fx.GraphModule) -> fx.GraphModule:
        """What Inductor does to a graph before it is partitioned, where Inductor lowers it."""
        if self.lower is None and self.sharding.engine.device.type == "cuda":
            compile_ahead(joint.graph, self.sharding.engine.device)  # all kernels of ours that it will launch
        return _compat.inductor_joint_passes(joint) if self.sharding.options.lowering == "inductor" else joint

    def _decompositions(self) -> dict[Any, Any] | None:
        return _compat.inductor_decompositions() if self.sharding.options.lowering == "inductor" else None

    def before_autograd(self, graph: fx.GraphModule, refs: list[ParamRef | None]) -> fx.GraphModule:
        """The passes over a graph as Dynamo captured it, the first thing that happens to it."""
        self.observer = observer()
        if self.observer is not None:
            self.observer.say("Dynamo gave %d nodes", len(graph.graph.nodes))
        return before_autograd(graph, Capture(self, refs).context(Phase.FORWARD))

    def refs(self, graph: fx.GraphModule) -> list[ParamRef | None]:
        """The parameter that each input of a captured graph is, None for data."""
        return [self._ref(value) for value in graph_inputs(graph)]

    def _input_names(self, graph: fx.GraphModule, refs: list[ParamRef | None]) -> list[str | None]:
        """The names of the parameters and buffers among a captured graph's inputs, None for data."""
        plans = self.sharding.plans
        buffers = {id(tensor): name for name, tensor in self.buffers.items()}
        return [
            plans[ref.bucket].params[ref.position] if ref is not None else buffers.get(id(value))
            for ref, value in zip(refs, graph_inputs(graph), strict=True)
        ]

    def _note_break(self, broken: str) -> None:
        if self.sharding.plans and not self.allows_breaks:
            raise CaptureError(
                f"the graph breaks at {broken}\n"
                "Code between graphs would find parameters without memory: mend the break, or make the model "
                "with fxshard.compile(..., fullgraph=False), which unshards them for it"
            )
        if broken not in self.breaks:
            self.breaks.append(broken)

    def _ref(self, value: object) -> ParamRef | None:
        found = sharding_of(value)
        return found[1] if found is not None and found[0] is self.sharding else None


class Capture:
    """One graph on its way through AOTAutograd: tied to parameters, partitioned, scheduled, split, lowered."""

    def __init__(
        self,
        backend: Backend,
        refs: list[ParamRef | None],
        graph: fx.GraphModule | None = None,
        abridged: Abridged | None = None,
    ) -> None:
        """``refs`` are the parameters among the inputs of ``graph``; its constants become inputs ahead of these."""
        self._backend = backend
        self._abridged = abridged
        self._sharding = backend.sharding
        self._observer = backend.observer
        self.refs = [*[None] * (_compat.constants(graph) if graph is not None else 0), *refs]
        self._owner = object()
        self._backward: fx.GraphModule | None = None
        self._scheduled: dict[Phase, fx.GraphModule] = {}
        self._splits: dict[Phase, fx.GraphModule] = {}
        self._arena_bytes = 0
        self._agree: Callable[[], None] | None = None
        self._carries: dict[int, Event] = {}
        self._visible: int | None = None

    def partition(
        self, joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._backend.report("partitioning")
        if self._abridged is not None:
            joint = self._abridged.adopt(joint, kwargs["num_fwd_outputs"])
        else:
            joint = self.whole(self._backend.rewrite_joint(joint))
        self._tie(joint)
        self._visible = kwargs["num_fwd_outputs"]
        joint.graph.output_node().meta[GRADS] = (*[None] * kwargs["num_fwd_outputs"], *self.refs)
        joint = before_partition(joint, self.context(Phase.FORWARD))
        forward, backward = _compat.min_cut_partition(joint, inputs, **kwargs)
        # Scheduling a step needs both graphs at once, but AOTAutograd compiles backward later: work on a copy of it.
        self._backward = _copy(backward)
        self._backward.graph.output_node().meta[GRADS] = tuple(self.refs)
        return forward, backward

    def whole(self, joint: fx.GraphModule) -> fx.GraphModule:
        """The joint graph of the whole model; planning puts back the layers that it left out."""
        return joint

    def compile_forward(self, forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert self._backward is not None
        self._schedule({Phase.FORWARD: forward, Phase.BACKWARD: self._backward})
        self._compile_with_help()
        return self._lower(Phase.FORWARD)

    def compile_backward(self, backward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with no_garbage_collection():  # AOTAutograd calls this from the first backward
            return self._lower(Phase.BACKWARD)

    def compile_evaluation(self, forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self._abridged is not None:
            raise Unrepeatable  # nothing is to be differentiated, so nothing was abridged for it
        forward = self._backend.rewrite_joint(forward)
        self._tie(forward)
        self._schedule({Phase.EVAL: forward})
        self._compile_with_help()
        return self._lower(Phase.EVAL)

    def _tie(self, graph: fx.GraphModule) -> None:
        """Tie graph inputs to parameters, by position: training and inference graphs name them differently."""
        for node, ref in zip(graph.graph.find_nodes(op="placeholder"), self.refs, strict=False):
            node.meta[PARAM] = ref

    def context(self, phase: Phase) -> PassContext:
        sharding = self._sharding
        return PassContext(
            sharding.plans,
            sharding.options,
            phase,
            sharding.group_name,
            ranks=sharding.ranks,
            hardware=sharding.hardware,
            profile=sharding.profile,
            planned_experts=sharding.planned_experts,
            observer=self._observer,
        )

    def _schedule(self, modules: dict[Phase, fx.GraphModule]) -> None:
        self._backend.report("scheduling")
        name = "train" if Phase.FORWARD in modules else "eval"
        with blaming(chosen(self.context(Phase.FORWARD))):
            self._backend.schedules.update(self._emit(modules, name))
        emitted = self._backend.schedules[name]
        self._carries = {event.bucket_index: event for _, event in emitted.of(Kind.UNSHARD, phase=Phase.OPTIMIZER)}
        # Compared before the first run, not here: collectives under a compiler's dispatch modes can deadlock.
        self._agree = lambda: self._sharding.agreement.check(COMMUNICATION, emitted.communication())
        for phase, module in self._scheduled.items():
            self._backend.graphs[phase.value] = module
        self._backend.emitted.append(emitted)

    def _emit(self, modules: dict[Phase, fx.GraphModule], name: str) -> dict[str, Schedule]:
        """Run the passes, record what they made, and verify it."""
        sharding = self._sharding
        resident = resident_bytes(sharding.plans)
        self._scheduled, memory = schedule(modules, self.context(next(iter(modules))), resident)
        self._arena_bytes = memory.bytes
        emitted = record(
            self._scheduled,
            sharding.plans,
            memory,
            ranks=sharding.ranks,
            zero=sharding.zero,
            budget=sharding.options.memory_budget,
            carry=memory.leading if sharding.own_optimizer and self._backend.one_graph else 0,
        )
        made = {name: emitted}
        if Phase.BACKWARD in modules and sharding.ranks > 1:
            made["accumulate"] = emitted.accumulating()
        for kind, each in made.items():
            if self._observer is not None:
                self._observer.schedule(each, kind)
            if sharding.options.verify:
                each.verify()
        return made

    def _compile_with_help(self) -> None:
        """Compile all segments in several processes, if any were started, and end these."""
        if self._backend.lower is not None:
            return
        try:
            crew = hired() if self._sharding.options.lowering == "inductor" else None
            if crew is not None:
                with _compat.no_dispatch_modes():
                    split = [self._split(phase) for phase in self._scheduled]
                    everything = [segment for module in split for segment in segments(module)]
                    self._sharding.compiler.with_help(crew, everything)
                crew.finish()
        finally:
            dismiss()

    def _split(self, phase: Phase) -> fx.GraphModule:
        if phase not in self._splits:
            scheduled = self._scheduled[phase]
            watch = self._observer.begin(phase, "split_segments", scheduled) if self._observer is not None else None
            self._splits[phase] = split_segments(scheduled, self.context(phase))
            if watch is not None:
                watch.done(self._splits[phase])
        return self._splits[phase]

    def _lower(self, phase: Phase) -> Callable[..., Any]:
        if self._backend.lower is not None:
            return self._backend.lower(self._scheduled[phase])
        with _compat.no_dispatch_modes():
            split = self._split(phase)
            engine, compiler = self._sharding.engine, self._sharding.compiler
            agree = None if phase is Phase.BACKWARD else self._agree
            carries = self._carries if phase is Phase.FORWARD else None
            visible = self._visible if phase is Phase.FORWARD else None
            program = Program(split, phase, engine, self._arena_bytes, compiler, agree, self._owner, carries, visible)
            if self._observer is not None:
                so_far = "%s: lowered by %s; so far %d segments of the model, %d of them compiled"
                self._observer.say(so_far, phase, compiler.lowering, compiler.segments, compiler.compilations)
            return program.boxed()


def backend_of(sharding: Sharding) -> Backend:
    """The one backend of a sharded model, however ``torch.compile`` is reached: it has the schedule and the graphs."""
    if not isinstance(sharding.backend, Backend):
        sharding.backend = Backend(sharding)
        if sharding.options.lowering == "inductor" and sharding.engine.device.type == "cuda":
            start()
            warm_up(sharding.engine.device)  # done when the model has been traced
    return sharding.backend


def graph_inputs(graph: fx.GraphModule) -> list[Any]:
    """What a captured graph was called with."""
    return [_compat.graph_input_example(node) for node in graph.graph.find_nodes(op="placeholder")]


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    return _compat.graph_module(module, copy.deepcopy(module.graph))


def _device(example_inputs: Sequence[Any]) -> torch.device:
    for value in example_inputs:
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return value.device
    return torch.device("cpu")
