"""From a captured graph to forward and backward: joint passes, the min-cut partitioner, all layers put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxshard._torch import private
from fxshard.passes.pipeline import before_partition
from fxshard.passes.recompute_saved import Key, candidates, mark
from fxshard.passes.remove_detach import remove_detach
from fxshard.passes.saved_pairs import saved_pairs
from fxshard.passes.settle_saved import settle_saved
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.passes.stages import Captured, Partitioned
from fxshard.passes.unfold_layers import unfold_evaluation, unfold_step
from fxshard.planner.hardware import Hardware, hardware
from fxshard.schedule.activations import peak_bytes, step_activations
from fxshard.schedule.aliases import root_of
from fxshard.schedule.events import Phase
from fxshard.schedule.observe import Observer
from fxshard.schedule.offloads import Recomputed
from fxshard.schedule.params import GRADS, PARAM, ParamRef


def partition(captured: Captured, plan: ShardingPlan, observer: Observer | None = None) -> Partitioned | None:
    """Forward and backward with all layers; None if those that were left out cannot be put back."""
    inductor = plan.options.lowering == "inductor"
    graph = private.inductor_joint_passes(captured.graph) if inductor else remove_detach(captured.graph)
    if captured.outputs is None:
        private.draw_seeds_apart(graph.graph)
        return _evaluation(captured, graph)
    return _step(captured, graph, captured.outputs, plan, observer)


def _evaluation(captured: Captured, graph: fx.GraphModule) -> Partitioned | None:
    whole = unfold_evaluation(captured.folds, graph)
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
    asked = frozenset(node.name for node in joint.graph.nodes if "recompute" in node.meta)
    joint = before_partition(joint, plan.context(Phase.FORWARD, observer))
    source = _Joint(captured, joint, outputs, asked, plan.hardware or hardware("h200"), plan.options.fused)
    if plan.options.budget is None:
        cut = source.cut(joint)
        return None if cut is None else cut[0]
    return source.partitioned(frozenset(), ())


@dataclass(frozen=True)
class _Joint:
    """A joint graph that is cut in two, under a memory budget several times, each time with less saved."""

    captured: Captured
    graph: fx.GraphModule
    outputs: int
    asked: frozenset[str]
    """Nodes about which the model itself says whether they are saved."""
    machine: Hardware
    fused: bool
    """Whether stretches of compute will be compiled."""

    def cut(self, joint: fx.GraphModule) -> tuple[Partitioned, frozenset[str]] | None:
        """Forward and backward, and what is saved; None if layers cannot be put back. Writes to ``joint``."""
        captured, outputs = self.captured, self.outputs
        forward, backward = private.min_cut_partition(
            joint, (), num_fwd_outputs=outputs, static_lifetime_input_indices=list(captured.static)
        )
        results: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
        saved = frozenset(node.name for node in results[outputs:])
        private.draw_seeds_apart(forward.graph)
        settle_saved(forward, outputs)
        _copy_written(forward, outputs, captured.written)
        if captured.folds:
            whole = unfold_step(captured.folds, forward, backward, outputs)
            if whole is None:
                return None
            forward, backward = whole
            _tie(forward, captured.refs)
            _tie_saved(forward, backward, outputs)
        backward.graph.output_node().meta[GRADS] = captured.refs
        graphs = {Phase.FORWARD: forward, Phase.BACKWARD: backward}
        return Partitioned(graphs, outputs, *_left_out(captured)), saved

    def partitioned(
        self, marks: frozenset[str], recomputed: tuple[Recomputed, ...], tried: frozenset[Key] = frozenset()
    ) -> Partitioned | None:
        """With ``marks`` computed again in backward. ``tried``: kinds of values that were dropped, or cannot be."""
        joint = private.copied(self.graph)
        mark(joint.graph, marks)
        cut = self.cut(joint)
        if cut is None:
            return None
        partitioned, saved = cut
        most = self.peak(partitioned)  # now: events will be inserted into its graphs

        def tighter() -> Partitioned | None:
            done = tried
            for candidate in candidates(joint.graph, saved, self.asked, self.machine):
                if candidate.key not in done:
                    done |= {candidate.key}
                    found = self.partitioned(marks | candidate.nodes, (*recomputed, candidate.recomputed), done)
                    if found is not None and self.peak(found) < most:
                        return found
            return None

        return replace(partitioned, recomputed=recomputed, tighter=tighter)

    def peak(self, partitioned: Partitioned) -> int:
        return peak_bytes(step_activations(partitioned.graphs, self.fused))


def _copy_written(forward: fx.GraphModule, outputs: int, written: Sequence[int]) -> None:
    """Of what forward saves, copy inputs that get a new value after it: backward needs the one that forward read."""
    inputs = forward.graph.find_nodes(op="placeholder")
    changing = {inputs[i] for i in written}
    end = forward.graph.output_node()
    results: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    for i, node in enumerate(results[outputs:], outputs):
        if isinstance(node, fx.Node) and root_of(node) in changing:
            with forward.graph.inserting_before(end):
                results[i] = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
                results[i].meta.update(node.meta)
    end.args = (tuple(results),)


def _left_out(captured: Captured) -> tuple[frozenset[ParamRef], int]:
    dropped = {*captured.refs} - {*captured.traced_refs}
    return frozenset(ref for ref in dropped if ref is not None), sum(folded.removed for folded in captured.folds)


def _tie(graph: fx.GraphModule, refs: Sequence[ParamRef | None]) -> None:
    """Tie graph inputs to parameters, by position: training and inference graphs name them differently."""
    for node, ref in zip(graph.graph.find_nodes(op="placeholder"), refs, strict=False):
        node.meta[PARAM] = ref


def _tie_saved(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """What backward takes from forward is the parameter that it is there."""
    for source, node in saved_pairs(forward.graph, backward.graph, outputs):
        node.meta[PARAM] = source.meta.get(PARAM)
