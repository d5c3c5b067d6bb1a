"""One captured graph on its way through AOTAutograd: tied to parameters, partitioned, scheduled, lowered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx

from fxshard import _compat
from fxshard.events import Phase
from fxshard.inspect.record import record, resident_bytes
from fxshard.inspect.schedule import Schedule
from fxshard.lowering import once_each
from fxshard.outline import fits, outline
from fxshard.passes.context import GRADS, PARAM, ParamRef, PassContext
from fxshard.passes.pipeline import before_partition, chosen, schedule
from fxshard.passes.run import blaming
from fxshard.programs import Programs
from fxshard.repetition.abridged import Abridged
from fxshard.repetition.expansion import Shortened
from fxshard.repetition.parts import expand_parts
from fxshard.repetition.periods import Unrepeatable
from fxshard.runtime.program import segments
from fxshard.scheduled import Scheduled

if TYPE_CHECKING:
    from fxshard.backend import Backend


class Capture:
    """A graph that AOTAutograd traces, all of it."""

    traced = True
    """Whether AOTAutograd sees what is computed."""

    def __init__(self, backend: Backend, refs: list[ParamRef | None], graph: fx.GraphModule | None = None) -> None:
        """``refs`` are the parameters among the inputs of ``graph``; its constants become inputs ahead of these."""
        self._backend = backend
        self._sharding = backend.sharding
        self._observer = backend.observer
        self.refs = [*[None] * (_compat.constants(graph) if graph is not None else 0), *refs]
        self._backward: fx.GraphModule | None = None
        self._programs: Programs | None = None
        self._outputs: int | None = None
        self._recorded: Mapping[str, Schedule] = {}

    def partition(
        self, joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._backend.report("partitioning")
        self._outputs = kwargs["num_fwd_outputs"]
        forward, backward = self._cut(self._backend.rewrite_joint(joint), self.refs, **kwargs)
        # Scheduling a step needs both graphs at once, but AOTAutograd compiles backward later: work on a copy of it.
        self._keep_backward(duplicate(backward))
        return forward, backward

    def _keep_backward(self, backward: fx.GraphModule) -> None:
        self._backward = backward
        self._backward.graph.output_node().meta[GRADS] = tuple(self.refs)

    def compile_forward(self, forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert self._backward is not None
        self._finish(self._schedule({Phase.FORWARD: forward, Phase.BACKWARD: self._backward}))
        return self._lower(Phase.FORWARD)

    def compile_backward(self, backward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._lower(Phase.BACKWARD)

    def compile_evaluation(self, forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        forward = self._backend.rewrite_joint(forward)
        self._tie(forward, self.refs)
        self._finish(self._schedule({Phase.EVAL: forward}))
        return self._lower(Phase.EVAL)

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

    def _cut(
        self, joint: fx.GraphModule, refs: Sequence[ParamRef | None], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward out of one graph, whose inputs are ``refs``."""
        return _compat.min_cut_partition(self._prepared(joint, refs, kwargs["num_fwd_outputs"]), (), **kwargs)

    def _prepared(self, joint: fx.GraphModule, refs: Sequence[ParamRef | None], outputs: int) -> fx.GraphModule:
        self._tie(joint, refs)
        joint.graph.output_node().meta[GRADS] = (*[None] * outputs, *refs)
        return before_partition(joint, self.context(Phase.FORWARD))

    def _parts(
        self, joint: fx.GraphModule, short: Shortened | None, outputs: int, static: Collection[int]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward of all layers: out of those of four, if the others are like these in both, or else out
        of one graph of all. ``short`` puts back what is not in the joint graph.
        """
        if short is not None and self._names_no_layer():
            refs = [self.refs[i] for i in short.kept]
            try:
                four = self._prepared(duplicate(joint), refs, outputs)
                numbering = short.numbering(four)
                still = [k for k, i in enumerate(short.kept) if i in static]
                parts = _compat.min_cut_partition(
                    four, (), num_fwd_outputs=outputs, static_lifetime_input_indices=still
                )
                return expand_parts(short, parts, outputs, numbering, partial(self._tie, refs=self.refs))
            except Unrepeatable:
                pass
        whole = short.expand(joint) if short is not None else joint
        return self._cut(whole, self.refs, num_fwd_outputs=outputs, static_lifetime_input_indices=list(static))

    def _names_no_layer(self) -> bool:
        """Whether the passes ahead of the partitioner do the same to all layers, whatever their names."""
        return self._sharding.options.passes is None and not any(plan.quantized for plan in self._sharding.plans)

    def _tie(self, graph: fx.GraphModule, refs: Sequence[ParamRef | None]) -> None:
        """Tie graph inputs to parameters, by position: training and inference graphs name them differently."""
        for node, ref in zip(graph.graph.find_nodes(op="placeholder"), refs, strict=False):
            node.meta[PARAM] = ref

    def _schedule(self, graphs: dict[Phase, fx.GraphModule]) -> Scheduled:
        """Run the passes."""
        self._backend.report("scheduling")
        with blaming(chosen(self.context(Phase.FORWARD))):
            resident = resident_bytes(self._sharding.plans)
            scheduled, memory = schedule(graphs, self.context(next(iter(graphs))), resident)
        return Scheduled(scheduled, memory, outputs=self._outputs)

    def _finish(self, scheduled: Scheduled) -> None:
        """From here on the graphs are the model's: they can be looked at, and will run."""
        self._hand_out(scheduled)
        self._publish(scheduled)

    def _hand_out(self, scheduled: Scheduled) -> None:
        """Let other processes begin with what is scheduled."""
        if self._backend.lower is None:
            self._programs = Programs(self._sharding, scheduled, self.context)
            self._programs.hand_out()

    def _publish(self, scheduled: Scheduled) -> None:
        """Record what was scheduled, verify it, and show it as the model's."""
        with blaming(chosen(self.context(Phase.FORWARD))):
            self._recorded = scheduled.recorded or self._record(scheduled)
            for kind, each in self._recorded.items():
                if self._observer is not None:
                    self._observer.schedule(each, kind)
                if self._sharding.options.verify:
                    each.verify()
        self._backend.schedules.update(self._recorded)
        self._backend.emitted.append(self._recorded[scheduled.name])
        self._backend.scheduled.update(dict.fromkeys(scheduled.graphs, scheduled))
        self._emitted = self._recorded[scheduled.name]

    def _record(self, scheduled: Scheduled) -> dict[str, Schedule]:
        """What the graphs will do, by name."""
        sharding = self._sharding
        emitted = record(
            scheduled.graphs,
            sharding.plans,
            scheduled.memory,
            ranks=sharding.ranks,
            zero=sharding.zero,
            budget=sharding.options.memory_budget,
            carry=scheduled.memory.leading if sharding.own_optimizer and self._backend.one_graph else 0,
        )
        made = {scheduled.name: emitted}
        if Phase.BACKWARD in scheduled.graphs and sharding.ranks > 1:
            made["accumulate"] = emitted.accumulating()
        return made

    def _lower(self, phase: Phase) -> Callable[..., Any]:
        if self._backend.lower is not None:
            return self._backend.lower(self._backend.graphs[phase.value])
        assert self._programs is not None
        return self._programs.program(phase, self._emitted)


class Foreseen(Capture):
    """A graph whose forward and backward are scheduled before AOTAutograd is asked. It sees their outlines."""

    traced = False
    scheduled: Scheduled

    def foresee(self, abridged: Abridged) -> Scheduled:
        """Schedule a joint graph that was found otherwise, and let other processes begin with it."""
        self._outputs = abridged.outputs
        self._backend.report("partitioning")
        forward, backward = self._parts(abridged.joint, abridged.short, abridged.outputs, abridged.static)
        outlines = {Phase.FORWARD: outline(forward), Phase.BACKWARD: outline(backward)}
        backward.graph.output_node().meta[GRADS] = tuple(self.refs)
        found = self._schedule({Phase.FORWARD: forward, Phase.BACKWARD: backward})
        self.take(replace(found, outlines=outlines, left_out=abridged.left_out))
        return self.scheduled

    def behind(self, act: Callable[[], None]) -> None:
        """Do something behind the first backward."""
        assert self._programs is not None
        self._programs.rest = act

    def known(self) -> Scheduled:
        """What is scheduled, with all that was made of it, for the next start."""
        assert self._programs is not None
        splits = once_each(self._programs.splits())
        generated = self._sharding.compiler.noted(segment for split in splits.values() for segment in segments(split))
        return replace(self.scheduled, splits=splits, recorded=self._recorded, generated=generated)

    def take(self, scheduled: Scheduled) -> None:
        """Use what is scheduled already."""
        self.scheduled = scheduled
        self._sharding.compiler.take(scheduled.generated)
        self._hand_out(scheduled)

    def partition(
        self, joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = (self.scheduled.outlines[phase] for phase in (Phase.FORWARD, Phase.BACKWARD))
        outputs = kwargs["num_fwd_outputs"]
        if outputs != self.scheduled.outputs or not fits(forward, backward, joint, outputs):
            raise Unrepeatable
        return forward, backward

    def compile_forward(self, forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._publish(self.scheduled)
        return self._lower(Phase.FORWARD)

    def compile_evaluation(self, forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise Unrepeatable  # nothing is to be differentiated, so nothing was foreseen for it


def duplicate(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with the same values."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, env)
    end = module.graph.output_node()
    graph.output(fx.map_arg(end.args[0], env.__getitem__), end.type).meta.update(end.meta)
    return _compat.graph_module(module, graph)
