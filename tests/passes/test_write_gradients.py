"""``write_gradients``: products that are gradients go straight into their bucket, everything else keeps its copy."""

import torch
from torch import fx

from fxshard.kernels.ops import mm_into
from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.passes.write_gradients import write_gradients
from fxshard.schedule.events import Phase
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, aten, bucket, context, listing

SQUARE = (8, 8)
FRAME = context(bucket(0, SQUARE, (8,)), phase=Phase.BACKWARD)


def backward(*, used_twice: bool = False) -> fx.GraphModule:
    """Two gradients: a matrix product and a sum."""
    draft = Draft()
    dy, x = draft.input("dy", 4, 8), draft.input("x", 4, 8)
    weight = draft.call(aten.mm.default, draft.call(aten.t.default, dy), x)
    bias = draft.call(aten.sum.dim_IntList, dy, [0])
    extra = [draft.call(aten.sin.default, weight)] if used_twice else []
    return draft.output(weight, bias, *extra, grads=[ParamRef(0, 0), ParamRef(0, 1), *[None for _ in extra]])


def test_a_product_is_written_in_place_and_a_sum_is_copied() -> None:
    lines = listing(write_gradients(insert_reduce_scatter(backward(), FRAME), FRAME))
    assert "mm_into_default(t, x, b0[0])" in lines
    assert not any(line.startswith("mm(") for line in lines)
    assert sum(line.startswith("copy_") for line in lines) == 1


def test_a_product_that_is_used_elsewhere_is_left_alone() -> None:
    lines = listing(write_gradients(insert_reduce_scatter(backward(used_twice=True), FRAME), FRAME))
    assert any(line.startswith("mm(") for line in lines)
    assert sum(line.startswith("copy_") for line in lines) == 2


def test_another_dtype_on_the_cpu_is_left_alone() -> None:
    """The CPU has no product with another output dtype; the meta device stands for it here."""
    module = insert_reduce_scatter(backward(), FRAME)
    for node in module.graph.find_nodes(op="call_function", target=aten.mm.default):
        node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    assert not write_gradients(module, FRAME).graph.find_nodes(op="call_function", target=mm_into)


def test_the_op_writes_what_the_product_is() -> None:
    a, b = torch.randn(5, 3), torch.randn(3, 4)
    flat = torch.full((40,), torch.nan)
    place = flat[8:28].view(5, 4)
    mm_into(a, b, place)
    assert torch.equal(place, a @ b)
    assert flat[:8].isnan().all() and flat[28:].isnan().all()
