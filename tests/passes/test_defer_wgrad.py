"""defer_wgrad: products that only gradients wait for hide the last reduction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxshard.bench.captured import capture
from fxshard.passes.defer_wgrad import defer_wgrad
from fxshard.passes.options import Debug
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.schedule.events import Kind, Phase
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, aten, bucket, context, listing
from tests.pool import Pool
from tests.thorough import thorough
from tests.toy import Llama, batch
from tests.training import Run, sharded_run

SQUARE = (4, 4)


def two_layers(*, first_layer_bytes: int, **options: bool) -> list[str]:
    """Backward of b0, then of b1, whose gradient is the last to be complete. dx goes on, dw is a gradient."""
    draft = Draft()
    t, x = draft.input("t", *SQUARE), draft.input("x", *SQUARE)
    turned = draft.call(aten.t.default, t)
    dw = draft.call(aten.mm.default, turned, x)
    dwt = draft.call(aten.t.default, dw)
    dx = draft.call(aten.mm.default, t, x)
    last = draft.call(aten.mm.default, dx, x)
    module = draft.output(dwt, last, grads=[ParamRef(0, 0), ParamRef(1, 0)])
    sizes = bucket(0, SQUARE), bucket(1, (first_layer_bytes, 4))
    module = defer_wgrad(module, context(*sizes, phase=Phase.BACKWARD, **options))
    module.graph.lint()
    return listing(module)


AS_TRACED = ["t_1(t)", "mm(t_1, x)", "t_2(mm)", "mm_1(t, x)", "mm_2(mm_1, x)", "output(t_2, mm_2)"]


def test_the_smaller_bucket_is_left_for_the_end() -> None:
    assert two_layers(first_layer_bytes=64) == [
        "mm_1(t, x)",
        "mm_2(mm_1, x)",
        "t_1(t)",
        "mm(t_1, x)",
        "t_2(mm)",
        "output(t_2, mm_2)",
    ]


@pytest.mark.parametrize(
    "buckets",
    [
        pytest.param((bucket(0, (400, 4)), bucket(1, SQUARE)), id="the larger would be left"),
        pytest.param((bucket(0, SQUARE, ranks=1), bucket(1, (400, 4), ranks=1)), id="one rank reduces nothing"),
    ],
)
def test_nothing_moves(buckets: tuple[BucketPlan, BucketPlan]) -> None:
    draft = Draft()
    t = draft.input("t", *SQUARE)
    dw = draft.call(aten.mm.default, t, t)
    last = draft.call(aten.mm.default, t, t)
    module = draft.output(dw, last, grads=[ParamRef(0, 0), ParamRef(1, 0)])
    given = context(*buckets, phase=Phase.BACKWARD)
    assert listing(defer_wgrad(module, given)) == ["mm(t, t)", "mm_1(t, t)", "output(mm, mm_1)"]


def test_the_larger_is_left_where_nothing_else_would_hide_either() -> None:
    """As with experts: the embedding is smaller than a layer, and no product stands between their last gradients."""
    draft = Draft()
    t, x = draft.input("t", *SQUARE), draft.input("x", *SQUARE)
    tokens = draft.input("tokens", 4, dtype=torch.int64)
    dw = draft.call(aten.mm.default, t, x)
    scale = draft.call(aten.sin.default, t)
    last = draft.call(aten.embedding_dense_backward.default, scale, tokens, 4, -1, False)
    module = draft.output(dw, scale, last, grads=[ParamRef(0, 0), ParamRef(0, 1), ParamRef(1, 0)])
    big_first = context(bucket(0, (400, 4), SQUARE), bucket(1, SQUARE), phase=Phase.BACKWARD)
    assert listing(defer_wgrad(module, big_first)) == [
        "sin(t)",
        "embedding_dense_backward(sin, tokens, 4, -1, False)",
        "mm(t, x)",
        "output(mm, sin, embedding_dense_backward)",
    ]


def test_off() -> None:
    assert two_layers(first_layer_bytes=64, defer_wgrad=False) == AS_TRACED


def test_a_value_that_something_else_reads_stays() -> None:
    draft = Draft()
    t = draft.input("t", *SQUARE)
    dw = draft.call(aten.mm.default, t, t)
    last = draft.call(aten.mm.default, dw, t)
    module = draft.output(dw, last, grads=[ParamRef(0, 0), ParamRef(1, 0)])
    sizes = context(bucket(0, SQUARE), bucket(1, (64, 4)), phase=Phase.BACKWARD)
    assert listing(defer_wgrad(module, sizes)) == ["mm(t, t)", "mm_1(mm, t)", "output(mm, mm_1)"]


def stacked(*buckets: int) -> list[str]:
    """One product is the gradient of two stacked weights, of these buckets; the last gradient is bucket 1's."""
    draft = Draft()
    t = draft.input("t", *SQUARE)
    both = draft.call(aten.mm.default, t, t)
    parts = [draft.call(aten.select.int, both, 0, i) for i in range(2)]
    last = draft.call(aten.mm.default, t, t)
    refs = [ParamRef(bucket, i) for i, bucket in enumerate(buckets)]
    module = draft.output(*parts, last, grads=[*refs, ParamRef(1, 2)])
    sizes = context(bucket(0, (4,), (4,)), bucket(1, (4,), (4,), SQUARE), phase=Phase.BACKWARD)
    return listing(defer_wgrad(module, sizes))


@pytest.mark.shows("G9")
def test_a_product_that_is_several_gradients_moves_with_all_of_them() -> None:
    """As experts have it that were a loop over modules: their weights are stacked."""
    parts = ["mm(t, t)", "select(mm, 0, 0)", "select_1(mm, 0, 1)"]
    returned = "output(select, select_1, mm_1)"
    assert stacked(0, 0) == ["mm_1(t, t)", *parts, returned]
    assert stacked(0, 1) == [*parts, "mm_1(t, t)", returned], "it would hold up the other bucket"


# -- a whole model -----------------------------------------------------------------------------------------------------


def wide_vocabulary(layers: int = 2) -> nn.Module:
    """The embedding is larger than a layer, as in most language models."""
    torch.manual_seed(0)
    return Llama(vocab=1024, dim=32, layers=layers, heads=4, hidden=88)


@pytest.mark.shows("P6")
@pytest.mark.parametrize("vocab", [32768, thorough(4096)], ids=["large embedding", "small embedding"])
def test_less_is_exposed_and_the_schedule_holds(vocab: int) -> None:
    with torch.device("meta"):
        model = Llama(vocab=vocab, dim=512, layers=2, heads=4, hidden=1408)
    captured = capture(model, batch(0, 1, 0, 96, size=2, length=512), lowering="eager")
    exposed = {}
    for on in (False, True):
        schedule = captured.schedule(ranks=64, hardware="h200", debug=Debug(defer_wgrad=on))
        schedule.verify()
        exposed[on] = schedule.simulate("h200").exposed_seconds
        reduced = [event.bucket for _, event in schedule.of(Kind.REDUCE)]
        assert reduced[-2:] == (["emb", "layers.0"] if on else ["layers.0", "emb"])
    assert exposed[True] < exposed[False]


def on_and_off(lowering: str, layers: int) -> tuple[Run, Run]:
    on, off = (
        sharded_run(lambda: wide_vocabulary(layers), steps=2, lowering=lowering, defer_wgrad=defer)
        for defer in (True, False)
    )
    return on, off


@pytest.mark.shows("S3")
@pytest.mark.parametrize(("lowering", "layers"), [thorough("eager", 1), thorough("inductor", 1)])
def test_moving_products_changes_no_bit(ranks: Pool, lowering: str, layers: int) -> None:
    for on, off in ranks(2, on_and_off, lowering, layers, timeout=300):
        assert on.same(off)
