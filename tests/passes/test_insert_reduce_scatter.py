"""insert_reduce_scatter: gradients are written, reduced once complete, and two full buckets are enough."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.schedule.events import Kind, Phase, events
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, Pretend, aten, bucket, context, listing

SQUARE = (4, 4)


def inserted(module: fx.GraphModule, *buckets: object) -> fx.GraphModule:
    module = insert_reduce_scatter(module, context(*buckets, phase=Phase.BACKWARD))  # type: ignore[arg-type]
    module.graph.lint()
    return module


def test_what_is_inserted_and_where() -> None:
    """b1's two gradients come first, then b0's; b1 has a third parameter that gets none. g is the input's gradient."""
    draft = Draft()
    t = draft.input("t", *SQUARE)
    sin = draft.call(aten.sin.default, t)
    first = draft.call(aten.mm.default, sin, t)
    bias = draft.call(aten.sum.dim_IntList, first, [0])
    second = draft.call(aten.mm.default, first, t)
    cos = draft.call(aten.cos.default, second)
    third = draft.call(aten.mm.default, cos, t)
    refs = [ParamRef(0, 0), None, ParamRef(1, 0), ParamRef(1, 2), ParamRef(1, 1)]
    module = draft.output(third, cos, first, bias, None, grads=refs)
    module = inserted(module, bucket(0, SQUARE), bucket(1, SQUARE, SQUARE, (4,)))
    assert listing(module) == [
        "grad b1 (1,)",
        "sin(t)",
        "mm(sin, t)",
        "b1[0]",
        "copy__default(b1[0], mm)",
        "sum_1(mm, [0])",
        "b1[2]",
        "copy__default_1(b1[2], sum_1)",
        "mm_1(mm, t)",
        "reduce b1",
        "grad b0",
        "cos(mm_1)",
        "mm_2(cos, t)",
        "b0[0]",
        "copy__default_2(b0[0], mm_2)",
        "reduce b0",
        "finish b1",
        "finish b0",
        "output(None, cos, None, None, None)",
    ]


def test_the_third_bucket_makes_the_first_one_finish() -> None:
    draft = Draft()
    t = draft.input("t", *SQUARE)
    grads, node = [], t
    for _ in range(3):
        node = draft.call(aten.mm.default, node, t)
        grads.append(node)
    module = draft.output(*grads, grads=[ParamRef(i, 0) for i in range(3)])
    module = inserted(module, *(bucket(i, SQUARE) for i in range(3)))
    assert [line for line in listing(module) if "copy" not in line and "[" not in line] == [
        "grad b0",
        "mm(t, t)",
        "reduce b0",
        "grad b1",
        "mm_1(mm, t)",
        "reduce b1",
        "finish b0",
        "grad b2",
        "mm_2(mm_1, t)",
        "reduce b2",
        "finish b1",
        "finish b2",
        "output(None, None, None)",
    ]


def run(module: fx.GraphModule, buckets: list, *inputs: torch.Tensor) -> Pretend:
    pretend = Pretend(module, buckets)
    pretend.run(*inputs)
    return pretend


def test_one_node_that_is_the_gradient_of_two_parameters_is_written_to_both() -> None:
    buckets = [bucket(0, SQUARE, SQUARE), bucket(1, SQUARE)]
    draft = Draft()
    t = draft.input("t", *SQUARE)
    shared = draft.call(aten.mm.default, t, t)
    module = draft.output(shared, shared, shared, grads=[ParamRef(0, 0), ParamRef(1, 0), ParamRef(0, 1)])
    x = torch.randn(*SQUARE)
    reduced = run(inserted(module, *buckets), buckets, x).reduced
    assert all(torch.equal(grad, x @ x) for grads in reduced.values() for grad in grads)
    assert {name: len(grads) for name, grads in reduced.items()} == {"b0": 2, "b1": 1}


def test_a_gradient_that_is_an_input_is_written_too() -> None:
    buckets = [bucket(0, SQUARE, SQUARE), bucket(1, SQUARE)]
    draft = Draft()
    t, u = draft.input("t", *SQUARE), draft.input("u", *SQUARE)
    mm = draft.call(aten.mm.default, t, u)
    module = draft.output(t, mm, u, grads=[ParamRef(0, 0), ParamRef(0, 1), ParamRef(1, 0)])
    x, y = torch.randn(*SQUARE), torch.randn(*SQUARE)
    reduced = run(inserted(module, *buckets), buckets, x, y).reduced
    assert torch.equal(reduced["b0"][0], x) and torch.equal(reduced["b0"][1], x @ y)
    assert torch.equal(reduced["b1"][0], y)


def test_a_missing_gradient_is_zeros_and_a_frozen_bucket_has_none() -> None:
    buckets = [bucket(0, (4,), SQUARE, (2,)), bucket(1, SQUARE, trainable=False)]
    draft = Draft()
    t = draft.input("t", *SQUARE)
    mm = draft.call(aten.mm.default, t, t)
    module = draft.output(None, mm, None, None, grads=[ParamRef(0, 0), ParamRef(0, 1), ParamRef(0, 2), ParamRef(1, 0)])
    module = inserted(module, *buckets)
    (grad,) = [node for node, event in events(module.graph) if event.kind is Kind.GRAD]
    assert grad.kwargs == {"zeros": (0, 2)}
    x = torch.randn(*SQUARE)
    pretend = run(module, buckets, x)
    assert list(pretend.reduced) == ["b0"]
    assert [grad.abs().sum().item() for grad in pretend.reduced["b0"]] == [0, (x @ x).abs().sum().item(), 0]


def test_a_graph_without_gradients_of_parameters_is_left_alone() -> None:
    draft = Draft()
    module = draft.output(draft.call(aten.sin.default, draft.input("t", 4)), None, grads=[None, ParamRef(0, 0)])
    assert listing(inserted(module, bucket(0, (4,)))) == ["sin(t)", "output(sin, None)"]


def test_views_carry_the_dtype_of_the_reduction() -> None:
    plan = replace(bucket(0, SQUARE), reduce_dtype=torch.float64)
    draft = Draft()
    t = draft.input("t", *SQUARE)
    module = inserted(draft.output(draft.call(aten.mm.default, t, t), grads=[ParamRef(0, 0)]), plan)
    (copy,) = module.graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert copy.args[0].meta["val"].dtype is torch.float64
    (record,) = [event for _, event in events(module.graph) if event.kind is Kind.REDUCE]
    assert (record.dtype, record.bytes) == (torch.float64, plan.layout.numel * 8)


@dataclass(frozen=True)
class Case:
    """A backward graph: per parameter, in the order in which gradients appear, what produces the gradient."""

    order: list[ParamRef]
    producers: list[str]
    sizes: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    refs = [ParamRef(b, p) for b, size in enumerate(sizes) for p in range(size)]
    order = draw(st.permutations(refs))
    kinds = st.sampled_from(["mm", "mm", "sin", "sin", "shared", "input", "none"])
    return Case(list(order), draw(st.lists(kinds, min_size=len(refs), max_size=len(refs))), sizes)


def backward(case: Case) -> fx.GraphModule:
    draft = Draft()
    t, u = draft.input("t", *SQUARE), draft.input("u", *SQUARE)
    node, gradients = t, {}
    for ref, producer in zip(case.order, case.producers, strict=True):
        if producer == "mm":
            node = draft.call(aten.mm.default, node, t)
        elif producer == "sin":
            node = draft.call(aten.sin.default, node)
        gradients[ref] = None if producer == "none" else u if producer == "input" else node
    refs = sorted(gradients)
    return draft.output(node, *(gradients[ref] for ref in refs), grads=[None, *refs])


@pytest.mark.shows("S5")
@settings(max_examples=60)
@given(case=cases())
def test_any_order_of_completion(case: Case) -> None:
    """Every bucket is reduced once with the right numbers, and never are more than two alive."""
    buckets = [bucket(i, *[SQUARE] * size) for i, size in enumerate(case.sizes)]
    t, u = torch.randn(2, *SQUARE) / 2
    result, *gradients = backward(case)(t, u)
    expected: dict[str, list[torch.Tensor | None]] = {plan.name: [] for plan in buckets}
    for ref, gradient in zip(sorted(case.order), gradients, strict=True):
        expected[f"b{ref.bucket}"].append(gradient)
    expected = {name: grads for name, grads in expected.items() if any(grad is not None for grad in grads)}

    pretend = Pretend(inserted(backward(case), *buckets), buckets)
    returned, *nothing = pretend.run(t, u)
    assert torch.equal(returned, result) and nothing == [None] * len(case.order)
    assert set(pretend.reduced) == set(expected)
    for name, grads in expected.items():
        for got, wanted in zip(pretend.reduced[name], grads, strict=True):
            assert torch.equal(got, torch.zeros(SQUARE) if wanted is None else wanted)
    assert pretend.most_alive <= 2
    assert pretend.gradients == {}, "a gradient bucket is never finished"
    assert sorted(pretend.log) == sorted(f"{kind} {name}" for kind in ("grad", "reduce", "finish") for name in expected)
