"""A captured graph through AOTAutograd, which is entered once: traced, partitioned, and later made callable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxshard._torch import private
from fxshard._torch.errors import CaptureError, StateError
from fxshard._torch.log import LOG
from fxshard.frontend.absent_layers import AbsentLayers, LayersDifferError
from fxshard.passes.fold_layers import Folded, fold_stacks, kept_of
from fxshard.passes.partition import partition
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.passes.stages import Captured, Partitioned, Scheduled
from fxshard.planner.model_groups import labelled
from fxshard.runtime.program import Program
from fxshard.schedule.collectives import GROUP
from fxshard.schedule.events import Phase
from fxshard.schedule.observe import Observer
from fxshard.schedule.params import PARAM, ParamRef

Report = Callable[[str], None]
"""Called when a stage begins."""


@dataclass(frozen=True)
class Step:
    """A captured graph, partitioned, and what is needed to make it callable."""

    partitioned: Partitioned
    traced: private.Traced
    folds: tuple[Folded, ...]

    def callable(self, scheduled: Scheduled, programs: dict[Phase, Program]) -> Callable[..., Any]:
        """What Dynamo calls with the inputs of the graph that it captured."""
        graphs = list(scheduled.graphs.values())
        forward = programs.get(Phase.FORWARD) or programs[Phase.EVAL]
        backward = programs.get(Phase.BACKWARD)
        run = self.traced.callable(graphs, forward.boxed(), backward.boxed() if backward is not None else None)
        if backward is not None:
            run = prepare_backward(run, backward)
        if not self.folds:
            return run
        kept = kept_of(self.folds, range(len(self.folds[0].members)))
        return lambda *args: run(*(args[i] for i in kept))


@contextmanager
def partitioned_step(
    graph: fx.GraphModule,
    refs: Sequence[ParamRef | None],
    inputs: Sequence[Any],
    plan: ShardingPlan,
    observer: Observer | None,
    report: Report = lambda stage: None,
    absent: AbsentLayers | None = None,
) -> Iterator[Step]:
    """Forward and backward of a captured graph. The callable must be made before the block ends.

    Layers that repeat are traced once where that is certain to give the same; otherwise all of them are. ``absent``:
    layers that the graph has not.
    """
    for folds in _attempts(graph, refs, plan):
        given, whole = kept_of(folds, inputs), refs
        if absent is not None:
            if not folds:
                raise LayersDifferError(absent.path)
            first, whole = absent.put_back(folds[0], refs, plan)
            folds = (first, *folds[1:])
        traced_graph = folds[-1].graph if folds else graph
        with _captured(traced_graph, whole, given, plan, folds, report) as (captured, traced):
            report("partitioning")
            partitioned = partition(captured, plan, observer)
            if partitioned is not None:
                yield Step(partitioned, traced, folds)
                return
        LOG.debug("the joint graph does not repeat as the captured one does: more layers are traced")


def _attempts(
    graph: fx.GraphModule, refs: Sequence[ParamRef | None], plan: ShardingPlan
) -> Iterator[tuple[Folded, ...]]:
    """Which layers to leave out: those of all stacks, or, if these cannot be put back, of the largest; none at last."""
    options = plan.options
    joint = options.passes.joint if options.passes is not None else ()
    if options.debug.fold_layers and not any(place.own for place in joint):
        kinds = [plan.kind(ref) if ref is not None else None for ref in refs]
        stacks = fold_stacks(graph, kinds)
        if stacks:
            yield stacks
        if len(stacks) > 1:
            yield stacks[:1]
    yield ()


@contextmanager
def _captured(
    graph: fx.GraphModule,
    refs: Sequence[ParamRef | None],
    inputs: Sequence[Any],
    plan: ShardingPlan,
    folds: tuple[Folded, ...],
    report: Report,
) -> Iterator[tuple[Captured, private.Traced]]:
    report("differentiating")
    constants = [None] * private.constants(graph)
    decompositions = private.inductor_decompositions() if plan.options.lowering == "inductor" else None
    with private.traced(graph, inputs, decompositions) as traced:
        _refuse_effects(traced)
        private.split_coalesced(traced.graph.graph)
        note_groups(traced.graph.graph)
        every = (*constants, *refs)
        static, written = traced.static_inputs, traced.written_inputs
        _refuse_written(every, written, plan)
        _refuse_sparse(traced)
        yield Captured(traced.graph, every, traced.outputs, static, folds, written), traced


def _refuse_written(refs: Sequence[ParamRef | None], written: Sequence[int], plan: ShardingPlan) -> None:
    """Raise if forward changes parameters: it sees them gathered, and what it writes would not reach the shards."""
    changed = [refs[i] for i in written]
    names = [plan.buckets[ref.bucket].params[ref.position] for ref in changed if ref is not None]
    if names:
        raise CaptureError(
            f"forward changes the parameter {names[0]!r} in place, but it sees a gathered copy of what the ranks hold. "
            "Use a changed copy (weight.clamp(...) in place of clamp_), make it a buffer, or change it outside of "
            "forward, below torch.no_grad()"
        )


def _refuse_effects(traced: private.Traced) -> None:
    """Raise if forward calls operators with side effects: a schedule would have to keep their order."""
    if traced.effects:
        raise CaptureError(
            f"forward calls {', '.join(traced.effects)}, which raises errors or does something else beside computing "
            "its result. Call what does not: torch.linalg.solve_ex, inv_ex or cholesky_ex, which return whether they "
            "succeeded, in place of solve, inv or cholesky; or put the call into a function below "
            "@torch.compiler.disable, and compile with fullgraph=False"
        )


def _refuse_sparse(traced: private.Traced) -> None:
    """Raise if a gradient is a sparse tensor, which has no place in a bucket."""
    returned = traced.graph.graph.output_node().all_input_nodes if traced.trains else []
    if any(getattr(node.meta.get("val"), "layout", None) is torch.sparse_coo for node in returned):
        raise CaptureError(
            "a gradient is a sparse tensor (an embedding with sparse=True), and gradients are reduced in flat buckets: "
            "leave out sparse=True"
        )


def graph_inputs(graph: fx.GraphModule) -> list[Any]:
    """What a captured graph was called with."""
    return [private.graph_input_example(node) for node in graph.graph.find_nodes(op="placeholder")]


def tie_parameters(graph: fx.GraphModule, refs: Sequence[ParamRef | None]) -> None:
    """Note on the inputs of a captured graph which parameters they are, for the passes before autograd."""
    for node, ref in zip(graph.graph.find_nodes(op="placeholder"), refs, strict=True):
        node.meta[PARAM] = ref


def outputs_without_values(graph: fx.GraphModule) -> tuple[Any, ...]:
    """What a captured graph returns, as tensors on the meta device: for a graph that is planned and never run."""

    def on_meta(node: fx.Node) -> Any:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return tuple(fx.map_arg(graph.graph.output_node().args[0], on_meta))  # type: ignore[arg-type]


def note_groups(graph: fx.Graph) -> None:
    """Note on each collective of the model's own how a schedule calls its group, and where its ranks lie."""
    starts = [node for node in graph.nodes if private.collective_name(node) is not None]
    found = [private.group_ranks(private.collective_group(node)) for node in starts]
    groups = labelled(found)
    for node, (name, _, _) in zip(starts, found, strict=True):
        node.meta[GROUP] = groups[name]


def prepare_backward(run: Callable[..., Any], backward: Program) -> Callable[..., Any]:
    """``run`` as it is, but ``backward`` learns which results of it have no gradient, and what it cannot do is refused
    before anything is sent.
    """

    def call(*args: Any) -> Any:
        results = run(*args)
        versions = backward.versions()  # after it: what it gathers into memory that stays counts as a change, too

        def tell(missing: frozenset[int]) -> None:
            if torch.is_grad_enabled():
                raise StateError(_SECOND_ORDER)
            backward.refuse_changed(versions)
            backward.without_loss = missing if backward.needs_losses else frozenset()

        private.before_backward(results, tell)
        return results

    return call


_SECOND_ORDER = (
    "create_graph=True: gradients of gradients do not go through a compiled backward (torch.compile makes none). "
    "Call backward() or torch.autograd.grad without it; a penalty on gradients of inputs needs a model that is not "
    "compiled"
)
