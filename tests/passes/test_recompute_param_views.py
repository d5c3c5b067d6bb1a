"""recompute_param_views: what follows from parameters alone is marked, and is not saved for backward."""

from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.passes.recompute_param_views import recompute_param_views
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, aten, bucket, context


def joint() -> fx.GraphModule:
    """Forward y = x·(½(w + v))ᵀ, backward through the same transposed weight."""
    draft = Draft()
    w = draft.input("primals_1", 8, 4, param=ParamRef(0, 0))
    v = draft.input("primals_2", 8, 4, param=ParamRef(1, 0))
    x = draft.input("primals_3", 16, 4)
    tangent = draft.input("tangents_1", 16, 8)
    mean = draft.call(aten.mul.Tensor, draft.call(aten.add.Tensor, w, v), 0.5)
    weight = draft.call(aten.t.default, mean)
    y = draft.call(aten.sin.default, draft.call(aten.mm.default, x, weight))
    back = draft.call(aten.t.default, weight)
    grad_x = draft.call(aten.mm.default, draft.call(aten.mul.Tensor, tangent, draft.call(aten.cos.default, y)), back)
    return draft.output(y, None, None, grad_x)


FRAME = context(bucket(0, (8, 4)), bucket(1, (8, 4)))


def marked(module: fx.GraphModule) -> set[str]:
    return {node.name for node in module.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE}


def test_marks_what_depends_on_parameters_alone() -> None:
    """Also on several parameters, of several buckets, through any chain; not what mixes in an input."""
    assert marked(recompute_param_views(joint(), FRAME)) == {"add", "mul", "t", "t_1"}


def test_nothing_is_marked_without_parameters() -> None:
    module = joint()
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta.pop("fxshard_param")
    assert marked(recompute_param_views(module, FRAME)) == set()


def test_a_constant_is_made_again_but_is_no_parameter() -> None:
    """What is computed from it and a parameter may be worth keeping."""
    draft = Draft()
    w = draft.input("w", 4, param=ParamRef(0, 0))
    ones = draft.call(torch.ops.aten.ones.default, [4], device="meta")
    draft.call(aten.sin.default, w)
    module = recompute_param_views(draft.output(draft.call(aten.mul.Tensor, w, ones)), FRAME)
    assert marked(module) == {"ones", "sin"}


def test_what_codes_stand_for_is_made_again() -> None:
    """A parameter looks it up in a table, an input. Tokens that look up a parameter, or a row of an input, do not."""
    draft = Draft()
    codes = draft.input("codes", 4, param=ParamRef(0, 0))
    table, tokens = draft.input("table", 16), draft.input("tokens", 4)
    values = draft.call(aten.index.Tensor, table, [draft.call(aten._to_copy.default, codes, dtype=torch.int64)])
    scaled = draft.call(aten.mul.Tensor, values, codes)
    position = draft.call(aten._to_copy.default, tokens, dtype=torch.int64)
    others = [draft.call(aten.index.Tensor, source, [position]) for source in (codes, table)]
    module = recompute_param_views(draft.output(scaled, *others), FRAME)
    assert marked(module) == {"_to_copy", "index", "mul"}


def saved(module: fx.GraphModule) -> list[str]:
    """What the partitioner hands from forward to backward."""
    inputs: list[Any] = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    forward, _ = min_cut_rematerialization_partition(module, inputs, num_fwd_outputs=1)
    returned = forward.graph.output_node().args[0]
    return [node.name for node in returned[1:]]  # type: ignore[union-attr, index]


def test_the_partitioner_saves_the_parameters_and_not_what_follows_from_them() -> None:
    kept = saved(recompute_param_views(joint(), FRAME))
    assert {"primals_1", "primals_2"} <= set(kept)
    assert not {"add", "mul", "t", "t_1"} & set(kept)
    # Without the pass the smaller mean of the two weights is what is saved.
    assert {"add", "mul", "t", "t_1"} & set(saved(joint()))
