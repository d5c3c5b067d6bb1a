"""From a captured graph to forward and backward: joint passes, the min-cut partitioner, all layers put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxshard._torch import private
from fxshard.passes.pipeline import before_partition
from fxshard.passes.remove_detach import remove_detach
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.passes.stages import Captured, Partitioned
from fxshard.passes.unfold_layers import unfold_evaluation, unfold_step
from fxshard.schedule.events import Phase
from fxshard.schedule.observe import Observer
from fxshard.schedule.params import GRADS, PARAM, ParamRef


def partition(captured: Captured, plan: ShardingPlan, observer: Observer | None = None) -> Partitioned | None:
    """Forward and backward with all layers; None if those that were left out cannot be put back."""
    if captured.folded is not None and private.draws_random_numbers(captured.graph.graph):
        return None  # Inductor numbers the random numbers of a whole graph
    inductor = plan.options.lowering == "inductor"
    graph = private.inductor_joint_passes(captured.graph) if inductor else remove_detach(captured.graph)
    if captured.outputs is None:
        return _evaluation(captured, graph)
    return _step(captured, graph, captured.outputs, plan, observer)


def _evaluation(captured: Captured, graph: fx.GraphModule) -> Partitioned | None:
    if captured.folded is None:
        _tie(graph, captured.refs)
        return Partitioned({Phase.EVAL: graph}, None)
    whole = unfold_evaluation(captured.folded, graph)
    if whole is None:
        return None
    _tie(whole, captured.refs)
    return Partitioned({Phase.EVAL: whole}, None, *_left_out(captured))


def _step(
    captured: Captured, joint: fx.GraphModule, outputs: int, plan: ShardingPlan, observer: Observer | None
) -> Partitioned | None:
    refs = captured.traced_refs
    _tie(joint, refs)
    joint.graph.output_node().meta[GRADS] = (*[None] * outputs, *refs)
    joint = before_partition(joint, plan.context(Phase.FORWARD, observer))
    forward, backward = private.min_cut_partition(
        joint, (), num_fwd_outputs=outputs, static_lifetime_input_indices=list(captured.static)
    )
    if captured.folded is not None:
        whole = unfold_step(captured.folded, forward, backward, outputs)
        if whole is None:
            return None
        forward, backward = whole
        _tie(forward, captured.refs)
        _tie_saved(forward, backward, outputs)
    backward.graph.output_node().meta[GRADS] = captured.refs
    return Partitioned({Phase.FORWARD: forward, Phase.BACKWARD: backward}, outputs, *_left_out(captured))


def _left_out(captured: Captured) -> tuple[frozenset[ParamRef], int]:
    if captured.folded is None:
        return frozenset(), 0
    kept = set(captured.folded.kept)
    dropped = (ref for i, ref in enumerate(captured.refs) if i not in kept and ref is not None)
    return frozenset(dropped), captured.folded.removed


def _tie(graph: fx.GraphModule, refs: Sequence[ParamRef | None]) -> None:
    """Tie graph inputs to parameters, by position: training and inference graphs name them differently."""
    for node, ref in zip(graph.graph.find_nodes(op="placeholder"), refs, strict=False):
        node.meta[PARAM] = ref


def _tie_saved(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """What backward takes from forward is the parameter that it is there."""
    results: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    for node, source in zip(backward.graph.find_nodes(op="placeholder"), results[outputs:], strict=False):
        node.meta[PARAM] = source.meta.get(PARAM)
