"""The ``torch.compile`` backend: ``capture → partition → schedule → lower → bind``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from fxshard._torch import private
from fxshard._torch.errors import CaptureError, ConfigError
from fxshard.frontend.capture import refuse_context_parallel
from fxshard.frontend.compiled import CompiledGraphs
from fxshard.frontend.lowering.programs import bind, lower
from fxshard.frontend.plain_graph import plain_graph
from fxshard.frontend.sharding import Sharding, sharding_of, unsharded
from fxshard.frontend.tracing import graph_inputs, partitioned_step, tie_parameters
from fxshard.kernels.report import ExpertsReport
from fxshard.passes.context import PassContext
from fxshard.passes.options import Options
from fxshard.passes.pipeline import before_autograd
from fxshard.passes.scheduling import schedule
from fxshard.passes.stages import Scheduled
from fxshard.runtime.agreement import COMMUNICATION
from fxshard.schedule.attention_report import AttentionReport
from fxshard.schedule.events import Phase
from fxshard.schedule.loss_report import LossReport
from fxshard.schedule.observe import Observer, observer
from fxshard.schedule.params import ParamRef
from fxshard.schedule.peak import Thing, largest
from fxshard.schedule.schedule import Schedule


def fxshard_backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="fxshard")``. A model that ``fxshard.shard`` took apart runs sharded."""
    if mode is not None:
        raise ConfigError(f"torch.compile(mode={mode!r}): modes are Inductor's; leave it out with backend='fxshard'")
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
    _warn_of_ranks(graph)
    return Backend(unsharded(Options.from_dict(options), _device(example_inputs)))(graph, example_inputs)


def _warn_of_ranks(graph: fx.GraphModule) -> None:
    """Say that a model which trains on several ranks is not sharded, unless it is inside DDP, which reduces."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1 or not torch.is_grad_enabled() or private.inside_ddp():
        return
    if any(isinstance(value, nn.Parameter) and value.requires_grad for value in graph_inputs(graph)):
        warnings.warn(
            f"torch.compile(model, backend='fxshard') of a model that is not sharded: each of {ranks} ranks trains by "
            "itself, no gradients are reduced. Compile fxshard.shard(model), or use fxshard.compile(model)",
            UserWarning,
            stacklevel=2,
        )


class Backend:
    """Compiles every graph that Dynamo captures for one sharded model, and keeps what it emitted."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding
        if sharding.options.lowering == "inductor" and sharding.engine.device.type == "cuda":
            private.start_compile_workers()  # they take seconds to start, in which Dynamo and AOTAutograd trace
        self.scheduled: dict[Phase, Scheduled] = {}
        """What the graph of each phase was scheduled with, the latest."""
        self.schedules: dict[str, Schedule] = {}
        self.emitted: list[Schedule] = []
        self.captured: list[str] = []
        """For each captured graph that was compiled, the shapes that it takes."""
        self.layers_folded = 0
        """Layers that did not go through autograd, being like those that did."""
        self.experts, self.attention, self.loss = ExpertsReport(), AttentionReport(), LossReport()
        """What became of experts and dense MLPs, of attention masks and of losses, in the graph captured last."""
        self.compiled = CompiledGraphs()
        self.used: set[ParamRef] = set()
        """Parameters that some graph uses."""
        self.breaks: list[str] = []
        """Where and why graphs ended before the model did."""
        self.allows_breaks = False
        self.one_graph = False
        """Whether Dynamo captures the whole model at once, so that a graph always gets the same parameters."""

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The scheduled graphs by phase."""
        return {phase.value: scheduled.graphs[phase] for phase, scheduled in self.scheduled.items()}

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        refuse_context_parallel()
        inputs = graph.graph.find_nodes(op="placeholder")  # of Dynamo's graph, whatever becomes of it
        run = self._compile_captured(graph, example_inputs)
        # Only now: compiling can close a size, or make Dynamo capture once more.
        self.captured.append(taken_shapes(inputs))
        return self.compiled.add(run) if self.sharding.plans else run  # without parameters there is nothing to free

    def _compile_captured(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        broken = private.graph_break(graph)
        if broken is not None:
            self._note_break(broken)
        watching = observer()
        if watching is not None:
            watching.say("Dynamo gave %d nodes", len(graph.graph.nodes))
        plain = plain_graph(graph)
        if plain is None:
            return self._compile_plain(graph, example_inputs, broken is not None, watching)
        return plain.called(
            self._compile_plain(plain.graph, plain.inputs(example_inputs), broken is not None, watching)
        )

    def _compile_plain(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], broken: bool, watching: Observer | None
    ) -> Callable[..., Any]:
        """The same for a graph that takes plain tensors."""
        refs = [self._ref(value) for value in graph_inputs(graph)]
        plan = self.sharding.plan(one_graph=self.one_graph)
        context = plan.context(Phase.FORWARD, watching)
        context.ends_early = broken
        tie_parameters(graph, refs)
        graph = before_autograd(graph, context)
        self.experts, self.attention, self.loss = context.experts, context.attention, context.loss
        if self.one_graph or not any(refs):
            return self._noting(context, self.compile(graph, refs, example_inputs, watching))
        again = private.copied(graph)  # before AOTAutograd has worked on it
        opened, floats = private.open_inputs(graph), private.open_floats(graph)

        def another(args: Sequence[Any]) -> Callable[..., Any]:
            refs = [self._ref(value) for value in args]
            if opened is None:
                fixed = private.with_floats(private.copied(again), {i: float(args[i]) for i in floats})
                return self.compile(fixed, refs, args, observer())
            with opened.tracing():
                return self.compile(private.copied(again), refs, opened.values, observer())

        first = self.compile(graph, refs, example_inputs, watching)
        return self._noting(context, variants(first, tuple(refs), self._ref, another, opened is not None, floats))

    def _noting(self, context: PassContext, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run`` with the results of the captured graph alone, where passes had it return logits for the optimizer."""
        return self.sharding.engine.logits.noting(context.heads, run) if context.heads else run

    def compile(
        self,
        graph: fx.GraphModule,
        refs: Sequence[ParamRef | None],
        inputs: Sequence[Any],
        watching: Observer | None = None,
    ) -> Callable[..., Any]:
        """The whole way of one captured graph."""
        sharding = self.sharding
        self.used.update(ref for ref in refs if ref is not None)
        plan = sharding.plan(one_graph=self.one_graph)
        with partitioned_step(graph, refs, inputs, plan, watching) as step:
            scheduled = schedule(step.partitioned, plan, watching)
            sharding.state.take(scheduled.schedule)
            self._publish(scheduled)
            lowered = lower(scheduled, plan, sharding.compiler, sharding.engine.device, watching)

            left_out = lowered[Phase.BACKWARD].leaves_out if Phase.BACKWARD in lowered else []

            def agree() -> None:
                # Before the first run, not while compiling: collectives under a compiler's modes can deadlock.
                some = ", ".join(left_out[:3]) + ", …" * (len(left_out) > 3)
                lines = [*scheduled.schedule.communication(), *sharding.state.lines()]
                sharding.agreement.check(COMMUNICATION, lines, leaves_out=some)
                sharding.state.apply()

            return step.callable(scheduled, bind(lowered, sharding.engine, agree))

    def largest(self) -> tuple[Thing, ...]:
        """The largest things in memory at the peak of a training step, or of an evaluation; empty before the first."""
        found = self.scheduled.get(Phase.FORWARD) or self.scheduled.get(Phase.EVAL)
        if found is None:
            return ()
        return largest(found.schedule, found.graphs, self.sharding.options.fused)

    def _publish(self, scheduled: Scheduled) -> None:
        """Show what was scheduled as the model's."""
        self.schedules.update(scheduled.schedules)
        self.emitted.append(scheduled.schedule)
        self.scheduled.update(dict.fromkeys(scheduled.graphs, scheduled))
        self.layers_folded += scheduled.layers_folded

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
    return sharding.backend


def _device(example_inputs: Sequence[Any]) -> torch.device:
    for value in example_inputs:
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return value.device
    return torch.device("cpu")


_ARGUMENT = re.compile(r"[lL]_(?:kw)?args_(\w+?)_?$")
"""What Dynamo calls an input that is an argument of ``forward``: by its position, or by its keyword."""


def taken_shapes(inputs: Sequence[fx.Node]) -> str:
    """The arguments among the inputs of Dynamo's graph, ``any`` where a size was left open."""
    mode = "training" if torch.is_grad_enabled() else "evaluation"
    arguments = [(found[1], node.meta.get("example_value")) for node in inputs if (found := _ARGUMENT.match(node.name))]
    shapes = [f"{name} {_shape(value)}" for name, value in arguments if isinstance(value, torch.Tensor)]
    return f"{', '.join(shapes) or 'values of an earlier graph'} ({mode})"


def _shape(value: torch.Tensor) -> str:
    sizes = ["any" if _is_open(size) else str(size) for size in value.shape]
    return f"[{', '.join(sizes)}]"


def _is_open(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and not str(size).isdigit()  # one that a guard closed prints as its value


Refs = tuple[ParamRef | None, ...]
Compile = Callable[[Sequence[Any]], Callable[..., Any]]


def variants(
    first: Callable[..., Any],
    refs: Refs,
    identify: Callable[[Any], ParamRef | None],
    compile: Compile,
    sizes_open: bool,
    floats: Collection[int],
) -> Callable[..., Any]:
    """What Dynamo calls in place of a compiled graph: chooses the program by the parameters that are passed.

    Dynamo treats the parameters of a module as inputs of its graph: code that was captured for one layer is called
    again with the parameters of the next. A program, however, is tied to its parameters: their buckets, their places,
    their schedule. So the inputs are looked at on every call, and each set of parameters gets a program of its own;
    so does each value of ``floats``, the inputs that are numbers which Dynamo left open.
    """
    others: dict[Any, Callable[..., Any]] = {}

    def call(*args: Any) -> Any:
        given = tuple(map(identify, args))
        if given == refs:
            return first(*args)
        # With open sizes every program takes what Dynamo's guards let through, as the first one does.
        numbers = tuple(float(args[i]) for i in floats)
        key = given, torch.is_grad_enabled(), numbers, () if sizes_open else tuple(map(_kind, args))
        if key not in others:
            with private.no_observers():
                others[key] = compile(args)
        return others[key](*args)

    return call


def _kind(value: Any) -> Any:
    """What a program is specialised on that was compiled for the values of a call, and has no guards of Dynamo's."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.device, value.shape, value.stride(), value.requires_grad
