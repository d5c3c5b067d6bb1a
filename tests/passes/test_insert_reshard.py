"""insert_reshard: a gathered bucket is released behind its last reader, and its memory never leaves the graph."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxshard._torch.errors import PassError
from fxshard.passes.context import PassContext
from fxshard.passes.insert_reshard import insert_reshard
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.schedule.events import Kind, Phase, events
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, Pretend, aten, bucket, context, listing

SQUARE = (4, 4)


def scheduled(module: fx.GraphModule, frame: PassContext) -> fx.GraphModule:
    return insert_reshard(insert_unshard(module, frame), frame)


def viewed_late() -> fx.GraphModule:
    """The weight is read by a product at once, and through a chain of views by a sum two products later."""
    draft = Draft()
    x, w = draft.input("x", *SQUARE), draft.input("w", *SQUARE, param=ParamRef(0, 0))
    row = draft.call(aten.select.int, draft.call(aten.t.default, w), 0, 1)
    first = draft.call(aten.mm.default, x, w)
    second = draft.call(aten.mm.default, first, x)
    add = draft.call(aten.add.Tensor, second, row)
    third = draft.call(aten.mm.default, add, x)
    return draft.output(draft.call(aten.mm.default, third, x))


def test_released_at_the_first_cut_behind_the_last_reader_of_any_view() -> None:
    module = scheduled(viewed_late(), context(bucket(0, SQUARE)))
    assert listing(module) == [
        "unshard b0",
        "wait b0",
        "b0[0]",
        "t(b0[0])",
        "select(t, 0, 1)",
        "mm(x, b0[0])",
        "mm_1(mm, x)",
        "add(mm_1, select)",
        "mm_2(add, x)",
        "reshard b0",
        "mm_3(mm_2, x)",
        "output(mm_3)",
    ]
    record = next(event for _, event in events(module.graph) if event.kind is Kind.RESHARD)
    assert "add" in record.why
    module.graph.lint()


def test_nothing_reads_the_bucket_after_its_release() -> None:
    """The pretended runtime overwrites what is released."""
    x, w, plan = torch.randn(*SQUARE), torch.randn(*SQUARE), bucket(0, SQUARE)
    (expected,) = viewed_late()(x, w)
    run = Pretend(scheduled(viewed_late(), context(plan)), [plan], {"b0.0": w})
    assert torch.equal(run.run(x, torch.full(SQUARE, torch.nan))[0], expected)
    assert run.gathered == {}


def test_each_bucket_is_released_behind_its_own_last_use() -> None:
    draft = Draft()
    x = draft.input("x", *SQUARE)
    w = [draft.input(f"w{i}", *SQUARE, param=ParamRef(i, 0)) for i in range(2)]
    first = draft.call(aten.mm.default, x, w[0])
    second = draft.call(aten.mm.default, first, w[1])
    module = scheduled(
        draft.output(draft.call(aten.mm.default, second, w[0])), context(bucket(0, SQUARE), bucket(1, SQUARE))
    )
    assert [line for line in listing(module) if "mm" in line or "reshard" in line] == [
        "mm(x, b0[0])",
        "mm_1(mm, b1[0])",
        "reshard b1",
        "mm_2(mm_1, b0[0])",
        "reshard b0",
        "output(mm_2)",
    ]


def same(draft: Draft, w: fx.Node) -> fx.Node:
    return draft.call(aten.alias.default, w)


def transposed_row(draft: Draft, w: fx.Node) -> fx.Node:
    return draft.call(aten.select.int, draft.call(aten.t.default, w), 0, 0)


def unsafe_half(draft: Draft, w: fx.Node) -> fx.Node:
    return draft.call(operator.getitem, draft.call(aten.unsafe_split.Tensor, w, 2), 1)


@pytest.mark.parametrize("view", [same, transposed_row, unsafe_half])
@pytest.mark.parametrize("phase", Phase)
def test_memory_of_a_parameter_that_leaves_is_an_error(view: Callable[[Draft, fx.Node], fx.Node], phase: Phase) -> None:
    draft = Draft()
    w = draft.input("w", *SQUARE, param=ParamRef(0, 0))
    module = draft.output(view(draft, w))
    with pytest.raises(PassError, match=rf"the {phase} graph returns memory of a parameter of 'b0' \(b0\.0\).*clone"):
        scheduled(module, context(bucket(0, SQUARE), phase=phase))


def test_a_copy_of_a_parameter_may_leave() -> None:
    draft = Draft()
    w = draft.input("w", *SQUARE, param=ParamRef(0, 0))
    module = scheduled(draft.output(draft.call(aten.clone.default, w)), context(bucket(0, SQUARE)))
    assert listing(module)[-3:] == ["clone(b0[0])", "reshard b0", "output(clone)"]


@pytest.mark.parametrize("zero, ranks", [(0, 2), (1, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("phase", Phase)
def test_a_resident_bucket_is_left_alone(zero: int, ranks: int, phase: Phase) -> None:
    plan = bucket(0, SQUARE, zero=zero, ranks=ranks)
    module = scheduled(viewed_late(), context(plan, phase=phase))
    assert not any(event.kind is Kind.RESHARD for _, event in events(module.graph))


def test_views_of_a_resident_bucket_may_leave() -> None:
    draft = Draft()
    w = draft.input("w", *SQUARE, param=ParamRef(0, 0))
    module = scheduled(draft.output(draft.call(aten.t.default, w)), context(bucket(0, SQUARE, zero=1)))
    assert listing(module)[-2:] == ["t(b0[0])", "output(t)"]
