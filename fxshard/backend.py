"""The ``torch.compile`` backend: from a captured graph to programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxshard import _compat
from fxshard.captured_graph import Capture, Foreseen, duplicate
from fxshard.compiled import CompiledGraphs
from fxshard.config import Options
from fxshard.elsewhere import start, warm_up
from fxshard.errors import CaptureError, ConfigError
from fxshard.events import Phase
from fxshard.fused.ahead import Kernel, compile_ahead
from fxshard.fused.choose import is_own
from fxshard.garbage import make_old
from fxshard.inspect.observe import Observer, observed, observer
from fxshard.inspect.schedule import Schedule
from fxshard.log import LOG
from fxshard.passes.context import ParamRef
from fxshard.passes.pipeline import before_autograd
from fxshard.remembered.canonical import Unnamed
from fxshard.remembered.key import key_of
from fxshard.remembered.recall import forget, recall, remember
from fxshard.remembered.recall import wanted as recall_wanted
from fxshard.repetition.abridged import abridge
from fxshard.repetition.gap import everything
from fxshard.repetition.periods import Unrepeatable
from fxshard.repetition.refill import refill
from fxshard.repetition.twins import Twins
from fxshard.scheduled import Scheduled
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
        self.scheduled: dict[Phase, Scheduled] = {}
        """What the graph of each phase was scheduled with, the latest."""
        self.schedules: dict[str, Schedule] = {}
        self.emitted: list[Schedule] = []
        self.captures = 0
        self.layers_left_out = 0
        """Layers that were not traced through autograd, being like those that were."""
        self.layers_passed_by = 0
        """Layers that Dynamo did not trace."""
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
        self.twins: Twins | None = None
        """The model that is captured in place of the sharded one, if one is."""
        self._kernels: set[Kernel] = set()
        """Kernels of ours that other processes were asked to compile."""

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The scheduled graphs by phase."""
        return {phase.value: scheduled.graphs[phase] for phase, scheduled in self.scheduled.items()}

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        passed_by = refill(graph, self.twins) if self.twins is not None else 0
        if passed_by:
            self.layers_passed_by += passed_by
            example_inputs = graph_inputs(graph)
        run = self._compile_captured(graph, example_inputs)
        make_old()  # Dynamo has garbage collected next
        return self.compiled.add(run) if self.sharding.plans else run  # without parameters there is nothing to let go

    def _compile_captured(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.captures += 1
        broken = _compat.graph_break(graph)
        if broken is not None:
            self._note_break(broken)
        refs = self.refs(graph)
        key = self._key(graph, refs)  # before passes write to the graph
        kept = self._compile_kept(key, refs, graph, example_inputs) if key is not None else None
        if kept is not None:
            return kept
        graph = self.before_autograd(graph, refs)
        if self.one_graph or not any(refs):
            return self._compile_whole(refs, graph, example_inputs, key)
        again = duplicate(graph)  # before AOTAutograd has worked on it

        def another(args: Sequence[Any]) -> Callable[..., Any]:
            self.observer = observer()
            return self.compile(Capture(self, [self._ref(value) for value in args], again), duplicate(again), args)

        first = self.compile(Capture(self, refs, graph), graph, example_inputs)
        return Variants(first, tuple(refs), self._ref, another)

    def _compile_whole(
        self, refs: list[ParamRef | None], graph: fx.GraphModule, example_inputs: Sequence[Any], key: str | None
    ) -> Callable[..., Any]:
        """Compile the graph of a model. If its layers repeat they go through autograd once, and what comes of it is
        kept under ``key``.
        """
        self._compile_ahead(graph)
        gapped = everything(graph) if self._foresees() else None
        if gapped is not None:
            compiled = self._compile_abridged(key, refs, graph, gapped, example_inputs)
            if compiled is not None:
                return compiled
        return self.compile(Capture(self, refs, graph), graph, example_inputs)

    def _compile_kept(
        self, key: str, refs: list[ParamRef | None], graph: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """Compile what was scheduled at an earlier start, if it was kept."""
        kept = recall(key)
        gapped = everything(graph) if kept is not None else None
        if kept is None or gapped is None:
            return None
        self.observer = None  # who watches has no key
        capture = Foreseen(self, refs)
        capture.take(kept)
        compiled = self._compile_foreseen(capture, gapped, example_inputs)
        if compiled is None:
            forget(key)
        else:
            capture.behind(lambda: self._complete(key, kept, capture))
        return compiled

    def _complete(self, key: str, kept: Scheduled, capture: Foreseen) -> None:
        """Keep what had to be compiled though its schedule was kept: the next start need not."""
        known = capture.known() if self.sharding.compiler.asked_inductor else kept
        if known.generated != kept.generated:
            remember(key, known)

    def _compile_abridged(
        self,
        key: str | None,
        refs: list[ParamRef | None],
        graph: fx.GraphModule,
        gapped: fx.GraphModule,
        example_inputs: Sequence[Any],
    ) -> Callable[..., Any] | None:
        """Compile what four of the layers tell, if they tell all."""
        capture = Foreseen(self, refs)
        names = self._input_names(graph, refs)
        found = abridge(graph, names, example_inputs, self._decompositions(), self.rewrite_joint, capture.foresee)
        compiled = self._compile_foreseen(capture, gapped, example_inputs) if found is not None else None
        if found is not None and compiled is not None and key is not None:
            capture.behind(lambda: remember(key, capture.known()))
        return compiled

    def _compile_foreseen(
        self, capture: Foreseen, gapped: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """Compile a graph that is scheduled; None if AOTAutograd, who sees its inputs and outputs, finds others."""
        try:
            compiled = self.compile(capture, gapped, example_inputs)
        except Unrepeatable:
            return None  # known before anything was shown
        self.layers_left_out += capture.scheduled.left_out
        return compiled

    def _foresees(self) -> bool:
        """Whether it is worth looking for layers that repeat."""
        options = self.sharding.options
        return self.one_graph and options.trace_once and torch.is_grad_enabled() and not _compat.compiled_autograd()

    def _key(self, graph: fx.GraphModule, refs: list[ParamRef | None]) -> str | None:
        """Under what a graph's schedule is kept for the next start; None if it cannot be, or is to be watched."""
        sharding = self.sharding
        kept = self._foresees() and self.lower is None and sharding.options.lowering == "inductor"
        if not kept or observed() or not recall_wanted():
            return None
        if sharding.profile is not None or is_own(sharding.options.experts):
            return None  # durations are never the same again, and what experts of the user's own ask for may not be
        told = (sharding.plans, sharding.options, sharding.precision, sharding.zero, sharding.group_name)
        machine = (sharding.ranks, sharding.hardware, sharding.own_optimizer, sharding.engine.device)
        try:
            return key_of(graph, graph_inputs(graph), refs, self._input_names(graph, refs), told, machine)
        except Unnamed as error:
            LOG.debug("this graph will be traced at each start: %s", error)
            return None

    def compile(self, capture: Capture, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Send a captured graph through AOTAutograd, which hands what it makes to ``capture``."""
        self.used.update(ref for ref in capture.refs if ref is not None)
        self.report("differentiating")
        return _compat.aot_autograd(
            fw_compiler=capture.compile_forward,
            bw_compiler=capture.compile_backward,
            inference_compiler=capture.compile_evaluation,
            partition_fn=capture.partition,
            decompositions=self._decompositions() if capture.traced else None,
        )(graph, example_inputs)

    def rewrite_joint(self, joint: fx.GraphModule) -> fx.GraphModule:
        """What Inductor does to a graph before it is partitioned, where Inductor lowers it."""
        self._compile_ahead(joint)
        return _compat.inductor_joint_passes(joint) if self.sharding.options.lowering == "inductor" else joint

    def _compile_ahead(self, module: fx.GraphModule) -> None:
        """Let other processes begin with kernels of ours that a graph will launch, as far as can be told."""
        if self.lower is None and self.sharding.engine.device.type == "cuda":
            compile_ahead(module.graph, self.sharding.engine.device, self._kernels)

    def _decompositions(self) -> dict[Any, Any] | None:
        return _compat.inductor_decompositions() if self.sharding.options.lowering == "inductor" else None

    def before_autograd(self, graph: fx.GraphModule, refs: list[ParamRef | None]) -> fx.GraphModule:
        """The passes over a graph as Dynamo captured it, the first thing that happens to it if it is new."""
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


def backend_of(sharding: Sharding) -> Backend:
    """The one backend of a sharded model, however ``torch.compile`` is reached: it has the schedule and the graphs."""
    if not isinstance(sharding.backend, Backend):
        sharding.backend = Backend(sharding)
        if sharding.options.lowering == "inductor" and sharding.engine.device.type == "cuda":
            start()
            warm_up(sharding.engine.device, {plan.param_dtype for plan in sharding.plans})  # while the model is traced
    return sharding.backend


def graph_inputs(graph: fx.GraphModule) -> list[Any]:
    """What a captured graph was called with."""
    return [_compat.graph_input_example(node) for node in graph.graph.find_nodes(op="placeholder")]


def _device(example_inputs: Sequence[Any]) -> torch.device:
    for value in example_inputs:
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return value.device
    return torch.device("cpu")
