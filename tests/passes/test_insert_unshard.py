"""insert_unshard: one gather per bucket, at the last cut before its first use, and uses that read from it."""

import operator

import pytest
import torch
from torch import fx

from fxshard.passes.insert_unshard import insert_unshard
from fxshard.schedule.events import Kind, Phase, event_of, events
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, Pretend, aten, bucket, context, listing

SQUARE = (4, 4)


def two_layers() -> fx.GraphModule:
    """sin → mm with b0 → cos → + bias of b0 → mm with b1, and b1's weight passed on for backward."""
    draft = Draft()
    w1 = draft.input("w1", *SQUARE, param=ParamRef(1, 0))
    x = draft.input("x", *SQUARE)
    w0, bias = draft.input("w0", *SQUARE, param=ParamRef(0, 1)), draft.input("bias", 4, param=ParamRef(0, 0))
    mm = draft.call(aten.mm.default, draft.call(aten.sin.default, x), w0)
    add = draft.call(aten.add.Tensor, draft.call(aten.cos.default, mm), bias)
    return draft.output(draft.call(aten.mm.default, add, w1), w1, w0)


BUCKETS = (bucket(0, (4,), SQUARE), bucket(1, SQUARE))


def test_what_is_inserted_and_where() -> None:
    module = insert_unshard(two_layers(), context(*BUCKETS))
    assert listing(module) == [
        "unshard b0",
        "wait b0",
        "b0[1]",
        "b0[0]",
        "sin(x)",
        "mm(sin, b0[1])",
        "unshard b1",
        "wait b1",
        "b1[0]",
        "cos(mm)",
        "add(cos, b0[0])",
        "mm_1(add, b1[0])",
        "output(mm_1, w1, w0)",
    ]
    module.graph.lint()


def test_the_gathered_parameters_give_the_same_numbers() -> None:
    x, w0, w1, bias = (torch.randn(*shape) for shape in (SQUARE, SQUARE, SQUARE, (4,)))
    hollow = torch.full(SQUARE, torch.nan)
    expected = two_layers()(w1, x, w0, bias)[0]
    module = insert_unshard(two_layers(), context(*BUCKETS))
    run = Pretend(module, BUCKETS, {"b0.0": bias, "b0.1": w0, "b1.0": w1})
    result, *saved = run.run(hollow, x, hollow, torch.full((4,), torch.nan))
    assert torch.equal(result, expected)
    assert all(kept is hollow for kept in saved)


def test_every_inserted_node_carries_its_record() -> None:
    module = insert_unshard(two_layers(), context(*BUCKETS, phase=Phase.EVAL))
    records = [event for _, event in events(module.graph)]
    assert [(event.kind, event.bucket_index) for event in records] == [
        (Kind.UNSHARD, 0),
        (Kind.WAIT, 0),
        (Kind.UNSHARD, 1),
        (Kind.WAIT, 1),
    ]
    assert {event.phase for event in records} == {Phase.EVAL}
    assert {event.group for event in records} == {"test"}
    assert records[0].params == ("b0.0", "b0.1")
    assert records[0].bytes == BUCKETS[0].layout.numel * 4
    assert (records[0].stream, records[1].stream) == ("gather", "compute")
    assert records[1].why == "first use: b0.1"


def test_views_have_the_shapes_of_the_parameters() -> None:
    module = insert_unshard(two_layers(), context(*BUCKETS))
    for node in module.graph.find_nodes(op="call_function", target=operator.getitem):
        event = event_of(node.args[0])  # type: ignore[arg-type]
        assert event is not None
        slot = BUCKETS[event.bucket_index].layout.slots[node.args[1]]  # type: ignore[index]
        assert tuple(node.meta["val"].shape) == slot.spec.shape


@pytest.mark.parametrize("phase, gathers", [(Phase.FORWARD, 2), (Phase.EVAL, 2), (Phase.BACKWARD, 0)])
def test_a_resident_bucket_is_refreshed_in_forward_only(phase: Phase, gathers: int) -> None:
    resident = (bucket(0, (4,), SQUARE, zero=2), bucket(1, SQUARE, zero=2))
    module = insert_unshard(two_layers(), context(*resident, phase=phase))
    kinds = [event.kind for _, event in events(module.graph)]
    assert (kinds.count(Kind.UNSHARD), kinds.count(Kind.WAIT)) == (gathers, 2)


def test_views_of_a_resident_bucket_cut_nothing_in_backward() -> None:
    """There is nothing to wait for: all of them are taken at the start."""
    resident = (bucket(0, (4,), SQUARE, zero=2), bucket(1, SQUARE, zero=2))
    module = insert_unshard(two_layers(), context(*resident, phase=Phase.BACKWARD))
    assert listing(module)[:6] == ["wait b0", "b0[1]", "b0[0]", "wait b1", "b1[0]", "sin(x)"]


def test_a_bucket_nobody_computes_with_is_not_gathered() -> None:
    draft = Draft()
    x, w = draft.input("x", 4), draft.input("w", 4, param=ParamRef(0, 0))
    module = insert_unshard(draft.output(draft.call(aten.sin.default, x), w), context(bucket(0, (4,))))
    assert listing(module) == ["sin(x)", "output(sin, w)"]


def test_a_node_that_uses_a_parameter_twice_reads_both_from_the_bucket() -> None:
    draft = Draft()
    w = draft.input("w", *SQUARE, param=ParamRef(0, 0))
    module = insert_unshard(draft.output(draft.call(aten.mm.default, w, w)), context(bucket(0, SQUARE)))
    assert listing(module) == ["unshard b0", "wait b0", "b0[0]", "mm(b0[0], b0[0])", "output(mm)"]


def test_two_buckets_of_one_cut_are_gathered_in_order_of_use() -> None:
    """b1 is used first though b0 has the lower index and the earlier input."""
    draft = Draft()
    w0, w1 = draft.input("w0", 4, param=ParamRef(0, 0)), draft.input("w1", 4, param=ParamRef(1, 0))
    last = draft.call(aten.mul.Tensor, draft.call(aten.sin.default, w1), w0)
    module = insert_unshard(draft.output(last), context(bucket(0, (4,)), bucket(1, (4,))))
    assert listing(module)[:6] == ["unshard b1", "wait b1", "b1[0]", "unshard b0", "wait b0", "b0[0]"]
