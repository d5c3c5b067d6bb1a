"""quantize_linears and stage_quantized on graphs that one can see whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from fxshard._torch.errors import PassError
from fxshard.kernels.op import grouped_product, grouped_wgrad
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.passes.quantize_linears import quantize_linears
from fxshard.passes.stage_quantized import stage_quantized
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.gather_modes import Gather
from fxshard.schedule.events import Kind, Phase, events
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, aten, bucket, context, listing

BF16 = torch.bfloat16
WEIGHT = ParamRef(0, 0)


def weights(gather: Gather) -> BucketPlan:
    return replace(bucket(0, (64, 32)), gather=gather, param_dtype=BF16)


def joint() -> fx.GraphModule:
    """y = x·wᵀ, and backward: dx = dy·w, dw = (xᵀ·dy)ᵀ as eager autograd writes it."""
    draft = Draft()
    w = draft.input("w", 64, 32, param=WEIGHT, dtype=BF16)
    x = draft.input("x", 48, 32, dtype=BF16)
    dy = draft.input("dy", 48, 64, dtype=BF16)
    turned = draft.call(aten.t.default, w)
    y = draft.call(aten.mm.default, x, turned)
    dx = draft.call(aten.mm.default, dy, draft.call(aten.t.default, turned))
    dw = draft.call(aten.t.default, draft.call(aten.mm.default, draft.call(aten.t.default, x), dy))
    return draft.output(y, dw, dx, grads=(None, WEIGHT, None))


def forward(extra: bool = False) -> fx.GraphModule:
    draft = Draft()
    w = draft.input("w", 64, 32, param=WEIGHT, dtype=BF16)
    x = draft.input("x", 48, 32, dtype=BF16)
    y = draft.call(aten.mm.default, x, draft.call(aten.t.default, w))
    return draft.output(y, draft.call(aten.sum.default, w)) if extra else draft.output(y)


def test_all_three_products_sum_over_the_blocks() -> None:
    module = quantize_linears(joint(), context(weights(Gather.OFF)))
    lines = [line for line in listing(module) if line.startswith("mxfp8") and "(" in line]
    assert lines == [
        "mxfp8_quantize_both_default(x)",  # one read for both directions
        "mxfp8_quantize_default(w, 1)",
        "mxfp8_mm_default(mxfp8_quantize_both_default[0], mxfp8_quantize_both_default[1], "
        "mxfp8_quantize_default[0], mxfp8_quantize_default[1], 1, 1, torch.bfloat16)",
        "mxfp8_quantize_both_default_1(dy)",
        "mxfp8_quantize_default_1(w, 0)",  # a weight's copies are made apart: forward and backward need one each
        "mxfp8_mm_default_1(mxfp8_quantize_both_default_1[0], mxfp8_quantize_both_default_1[1], "
        "mxfp8_quantize_default_1[0], mxfp8_quantize_default_1[1], 1, 0, torch.bfloat16)",
        "mxfp8_mm_default_2(mxfp8_quantize_both_default[2], mxfp8_quantize_both_default[3], "
        "mxfp8_quantize_both_default_1[2], mxfp8_quantize_both_default_1[3], 0, 0, torch.bfloat16)",
    ]
    assert "mm(" not in {line[:3] for line in listing(module)}


def experts() -> fx.GraphModule:
    """The three products of two experts, the weight's gradient turned there and back."""
    draft = Draft()
    w = draft.input("w", 2, 64, 32, param=WEIGHT, dtype=BF16)
    x, dy = draft.input("x", 48, 32, dtype=BF16), draft.input("dy", 48, 64, dtype=BF16)
    ends = draft.input("ends", 2, dtype=torch.int32)
    y = draft.call(grouped_product, x, draft.call(aten.transpose.int, w, 1, 2), ends, "torch")
    dx = draft.call(grouped_product, dy, w, ends, "torch")
    dw = draft.call(grouped_wgrad, dy, x, ends, "torch")
    turned = draft.call(aten.transpose.int, draft.call(aten.transpose.int, dw, 1, 2), 1, 2)
    return draft.output(y, turned, dx, grads=(None, WEIGHT, None))


def test_products_of_experts() -> None:
    stack = replace(bucket(0, (2, 64, 32)), gather=Gather.OFF, param_dtype=BF16)
    lines = [line for line in listing(quantize_linears(experts(), context(stack))) if "(" in line]
    assert [line.replace("mxfp8_", "").replace("_default", "") for line in lines] == [
        "quantize(x, 1)",
        "quantize_1(w, 1)",
        "grouped_mm(quantize[0], quantize[1], quantize_1[0], quantize_1[1], ends, 1, torch.bfloat16)",
        "quantize_2(dy, 1)",
        "quantize_3(w, 0)",
        "grouped_mm_1(quantize_2[0], quantize_2[1], quantize_3[0], quantize_3[1], ends, 0, torch.bfloat16)",
        "quantize_groups(dy, ends)",  # down the tokens of each expert
        "quantize_groups_1(x, ends)",
        "grouped_wgrad(quantize_groups[0], quantize_groups[1], quantize_groups_1[0], quantize_groups_1[1], ends, "
        "torch.float32)",  # as it is reduced
        "output(grouped_mm, grouped_wgrad, grouped_mm_1)",  # and not transposed
    ]


def test_weights_of_plain_buckets_are_left_alone() -> None:
    before = listing(joint())
    assert listing(quantize_linears(joint(), context(weights(Gather.PLAIN)))) == before


def test_a_bias_is_added_behind_the_product() -> None:
    draft = Draft()
    w = draft.input("w", 64, 32, param=WEIGHT, dtype=BF16)
    x, b = draft.input("x", 48, 32, dtype=BF16), draft.input("b", 64, dtype=BF16)
    y = draft.call(aten.addmm.default, b, x, draft.call(aten.t.default, w))
    lines = listing(quantize_linears(draft.output(y), context(weights(Gather.OFF))))
    assert lines[-2].startswith("add_tensor(mxfp8_mm_default, b")


@pytest.mark.shows("Q10")
def test_another_use_of_the_weight_is_an_error() -> None:
    with pytest.raises(PassError, match=r"'b0.0' is to run in MXFP8, but the forward graph also uses it in aten.sum"):
        quantize_linears(forward(extra=True), context(weights(Gather.OFF)))


@pytest.mark.shows("Q9")
@pytest.mark.parametrize("gather", [Gather.STAGED, Gather.DIRECT])
def test_what_rests_quantized_is_not_quantized_again(gather: Gather) -> None:
    placement = {} if gather is Gather.DIRECT else {"placement": bucket(0, (64, 32), zero=2).placement}
    frame = context(replace(weights(gather), **placement), phase=Phase.FORWARD)
    module = stage_quantized(insert_unshard(quantize_linears(forward(), frame), frame), frame)
    module.graph.lint()
    lines = listing(module)
    assert [line for line in lines if "quantize" in line and "mm" not in line] == [
        "mxfp8_quantize_default(x, 1)",
        "mxfp8_quantize_default[0]",
        "mxfp8_quantize_default[1]",
    ]
    assert any("b0[0], b0[1], 1, 1" in line for line in lines)  # the first two of four views: the rowwise copy
    (gathered,) = [event for _, event in events(module.graph) if event.kind is Kind.UNSHARD]
    assert gathered.copies == "rowwise"
    assert gathered.bytes == (64 * 32 * 33 // 32 if gather is Gather.DIRECT else 64 * 32 * 2)
