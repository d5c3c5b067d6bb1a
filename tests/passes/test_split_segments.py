"""split_segments: the same program in pieces. And structure: which pieces are compiled once."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fxshard.frontend.lowering.segments import SegmentCompiler, structure
from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.passes.insert_reshard import insert_reshard
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.passes.split_segments import split_segments
from fxshard.schedule.events import Phase, event_of, events
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, Pretend, aten, bucket, context, listing

SQUARE = (4, 4)
BUCKETS = [bucket(i, SQUARE) for i in range(4)]


def segments(split: fx.GraphModule) -> list[fx.GraphModule]:
    found = [split.get_submodule(str(node.target)) for node in split.graph.nodes if node.op == "call_module"]
    assert all(isinstance(segment, fx.GraphModule) for segment in found)
    return found  # type: ignore[return-value]


def forward() -> fx.GraphModule:
    """Two layers; a transposed view of the first result and the first input are read again behind the second gather."""
    draft = Draft()
    x = draft.input("x", *SQUARE)
    w = [draft.input(f"w{i}", *SQUARE, param=ParamRef(i, 0)) for i in range(2)]
    first = draft.call(aten.mm.default, draft.call(aten.sin.default, x), w[0])
    turned = draft.call(aten.t.default, first)
    second = draft.call(aten.mm.default, draft.call(aten.cos.default, turned), w[1])
    return draft.output(draft.call(aten.add.Tensor, second, turned), x)


def scheduled(module: fx.GraphModule, phase: Phase = Phase.FORWARD) -> fx.GraphModule:
    frame = context(*BUCKETS, phase=phase)
    module = insert_reshard(insert_unshard(module, frame), frame)
    return insert_reduce_scatter(module, frame) if phase is Phase.BACKWARD else module


def test_runtime_nodes_keep_their_order_and_compute_becomes_calls() -> None:
    split = split_segments(scheduled(forward()), context(*BUCKETS))
    assert listing(split) == [
        "unshard b0",
        "wait b0",
        "b0[0]",
        "segment_0(x, b0[0])",
        "segment_0[0]",
        "reshard b0",
        "unshard b1",
        "wait b1",
        "b1[0]",
        "segment_1(segment_0[0], b1[0])",
        "segment_1[0]",
        "reshard b1",
        "segment_2(segment_1[0], segment_0[0])",
        "segment_2[0]",
        "output(segment_2[0], x)",
    ]
    assert [listing(segment) for segment in segments(split)] == [
        ["sin(x)", "mm(sin, getitem)", "output(mm)"],
        ["t(mm)", "cos(t)", "mm_1(cos, getitem_1)", "output(mm_1)"],
        ["t(mm)", "add(mm_1, t)", "output(add)"],
    ]


def adding_to_zeros(*, written: bool = False) -> fx.GraphModule:
    """Three layers that use the same zeros, as torch leaves them behind; ``written``: the second writes to them."""
    draft = Draft()
    x = draft.input("x", *SQUARE)
    w = [draft.input(f"w{i}", *SQUARE, param=ParamRef(i, 0)) for i in range(3)]
    zeros = draft.call(aten.zeros.default, SQUARE, device="cpu")
    zeros.meta["val"] = torch.empty(SQUARE, device="meta")
    for layer, weight in enumerate(w):
        base = zeros
        if written and layer == 1:
            base = draft.call(aten.add_.Tensor, zeros, 1.0)
        x = draft.call(aten.mm.default, draft.call(aten.add.Tensor, base, x), weight)
    return draft.output(x)


def test_zeros_are_made_where_they_are_used() -> None:
    """Not handed on from the first layer: all layers are alike then, and nothing lives as long as the step."""
    split = split_segments(scheduled(adding_to_zeros()), context(*BUCKETS))
    assert [listing(segment)[:2] for segment in segments(split)] == [
        ["zeros((4, 4))", "add(zeros, x)"],
        ["zeros((4, 4))", "add_1(zeros, mm)"],
        ["zeros((4, 4))", "add_2(zeros, mm_1)"],
    ]
    assert len({structure(segment) for segment in segments(split)}) == 1
    w = {f"b{i}.0": torch.randn(*SQUARE) for i in range(3)}
    hollow = torch.full(SQUARE, torch.nan)
    assert_splits(adding_to_zeros(), Phase.FORWARD, [torch.randn(*SQUARE), hollow, hollow, hollow], w)


def test_what_somebody_writes_to_is_made_once() -> None:
    split = split_segments(scheduled(adding_to_zeros(written=True)), context(*BUCKETS))
    made = [line for segment in segments(split) for line in listing(segment) if line.startswith("zeros")]
    assert made == ["zeros((4, 4))"]


def assert_splits(
    module: fx.GraphModule, phase: Phase, inputs: list[Tensor], params: dict[str, Tensor]
) -> fx.GraphModule:
    """The split program must do what the scheduled one does, and hand out nothing it was given."""
    whole = scheduled(module, phase)
    before = [event for _, event in events(whole.graph)]
    split = split_segments(whole, context(*BUCKETS, phase=phase))
    assert [event for _, event in events(split.graph)] == before
    assert all(
        node.op in ("placeholder", "output", "call_module") or event_of(node) or node.target is operator.getitem
        for node in split.graph.nodes
    )
    one, many = Pretend(whole, BUCKETS, params), NoAliases(split, BUCKETS, params)
    for expected, got in zip(one.run(*inputs), many.run(*inputs), strict=True):
        assert (expected is None and got is None) or torch.equal(expected, got)
    assert one.log == many.log
    assert one.reduced.keys() == many.reduced.keys()
    for name, grads in one.reduced.items():
        assert all(map(torch.equal, grads, many.reduced[name]))
        assert not any(grad.isnan().any() for grad in grads)
    return split


class NoAliases(Pretend):
    """Refuses a segment that returns memory of its inputs."""

    def call_module(self, target: str, args: tuple, kwargs: dict) -> tuple:
        results = super().call_module(target, args, kwargs)
        given = {arg.untyped_storage().data_ptr() for arg in args}
        for result in results:
            assert isinstance(result, Tensor), f"{target} returns a {type(result)}"
            assert result.untyped_storage().data_ptr() not in given, f"{target} returns a view of an input"
        return results


def test_the_pieces_compute_what_the_whole_computes() -> None:
    w = {f"b{i}.0": torch.randn(*SQUARE) for i in range(2)}
    hollow = torch.full(SQUARE, torch.nan)
    assert_splits(forward(), Phase.FORWARD, [torch.randn(*SQUARE), hollow, hollow], w)


STEPS = st.lists(
    st.tuples(st.sampled_from(["mm", "sin", "t", "view", "split", "add", "param", "grad"]), st.integers(0, 50)),
    min_size=1,
    max_size=16,
)


@settings(max_examples=60)
@given(steps=STEPS)
def test_any_program_survives_being_split(steps: list[tuple[str, int]]) -> None:
    """Views of views, unpacked tuples, parameters and gradients in any order."""
    draft = Draft()
    x = draft.input("x", *SQUARE)
    params = [draft.input(f"w{i}", *SQUARE, param=ParamRef(i, 0)) for i in range(4)]
    made, grads = [x], {}
    for op, pick in steps:
        source = made[-1 - pick % min(len(made), 4)]
        if op == "mm":
            made.append(draft.call(aten.mm.default, source, x))
        elif op == "sin":
            made.append(draft.call(aten.sin.default, source))
        elif op == "t":
            made.append(draft.call(aten.t.default, source))
        elif op == "view":
            flat = draft.call(aten.reshape.default, draft.call(aten.clone.default, source), [16])
            made.append(draft.call(aten.view.default, flat, list(SQUARE)))
        elif op == "split":
            halves = draft.call(aten.split.Tensor, source, 2)
            parts = [draft.call(operator.getitem, halves, i) for i in (1, 0)]
            made.append(draft.call(aten.cat.default, parts))
        elif op == "add":
            made.append(draft.call(aten.add.Tensor, source, made[pick % len(made)]))
        elif op == "param":
            made.append(draft.call(aten.mm.default, source, params[pick % 4]))
        else:
            grads[pick % 4] = draft.call(aten.mm.default, source, made[pick % len(made)])
    result = draft.call(aten.sin.default, made[-1])
    refs = [ParamRef(i, 0) for i in sorted(grads)]
    module = draft.output(result, *(grads[i] for i in sorted(grads)), grads=[None, *refs])
    values = {f"b{i}.0": torch.randn(*SQUARE) / 2 for i in range(4)}
    hollow = [torch.full(SQUARE, torch.nan)] * 4
    assert_splits(module, Phase.BACKWARD, [torch.randn(*SQUARE) / 2, *hollow], values)


def test_a_tuple_is_unpacked_in_the_segment_that_makes_it() -> None:
    """A gather falls between an op with two results and the use of the second."""
    draft = Draft()
    x, w = draft.input("x", *SQUARE), draft.input("w", *SQUARE, param=ParamRef(0, 0))
    top = draft.call(aten.topk.default, draft.call(aten.mm.default, x, x), 4)
    values = draft.call(operator.getitem, top, 0)
    mm = draft.call(aten.mm.default, draft.call(aten.mm.default, values, x), w)
    indices = draft.call(operator.getitem, top, 1)
    module = draft.output(draft.call(aten.gather.default, mm, 1, indices))
    split = assert_splits(module, Phase.FORWARD, [torch.randn(*SQUARE)] * 2, {"b0.0": torch.randn(*SQUARE)})
    assert len(segments(split)) == 3


def test_a_graph_is_split_the_same_way_again() -> None:
    """It is kept when it was split, and a second start is to find in a cache what the first compiled."""
    draft = Draft()
    x, w = draft.input("x", *SQUARE), draft.input("w", *SQUARE, param=ParamRef(0, 0))
    top = draft.call(aten.topk.default, draft.call(aten.mm.default, x, w), 4)
    values, indices = (draft.call(operator.getitem, top, i) for i in range(2))
    module = scheduled(draft.output(draft.call(aten.gather.default, values, 1, indices)))
    split = [segments(split_segments(module, context(*BUCKETS))) for _ in range(3)]
    first, second, third = [[listing(segment) for segment in each] for each in split]
    assert first == second == third
    assert [line.split("(")[0] for line in first[-1]][:3] == ["topk", "topk[0]", "topk[1]"]


def several(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x + 1, [x * 2, x * 3]


def test_a_list_in_a_tuple_is_unpacked_where_it_is_made() -> None:
    """Gathers fall between an operator with such a result and the use of what is in the list."""
    draft = Draft()
    x, *w = draft.input("x", *SQUARE), *(draft.input(f"w{i}", *SQUARE, param=ParamRef(i, 0)) for i in range(2))
    made = draft.call(several, x)
    first = draft.call(operator.getitem, made, 0)
    mm = draft.call(aten.mm.default, draft.call(aten.mm.default, first, w[0]), w[1])
    inner = draft.call(operator.getitem, made, 1)
    both = [draft.call(operator.getitem, inner, i) for i in range(2)]
    module = scheduled(draft.output(draft.call(aten.add.Tensor, mm, draft.call(aten.mul.Tensor, *both))))
    one, other = (segments(split_segments(module, context(*BUCKETS))) for _ in range(2))
    assert [listing(each) for each in one] == [listing(each) for each in other]
    given = [node.meta["val"] for segment in one for node in segment.graph.find_nodes(op="placeholder")]
    assert all(isinstance(value, Tensor) for value in given)


def test_writes_without_a_reader_are_kept() -> None:
    draft = Draft()
    t = draft.input("t", *SQUARE)
    gradient = draft.call(aten.mm.default, t, t)
    module = draft.output(gradient, grads=[ParamRef(0, 0)])
    split = assert_splits(module, Phase.BACKWARD, [torch.randn(*SQUARE)], {})
    (segment,) = segments(split)
    assert listing(segment) == ["mm(t, t)", "copy__default(getitem, mm)", "output()"]


def test_nodes_that_nobody_reads_are_dropped() -> None:
    draft = Draft()
    x = draft.input("x", 4)
    draft.call(aten.exp.default, x)
    (segment,) = segments(split_segments(draft.output(draft.call(aten.sin.default, x)), context()))
    assert listing(segment) == ["sin(x)", "output(sin)"]


def test_a_graph_that_computes_nothing_has_no_segments() -> None:
    draft = Draft()
    x = draft.input("x", 4)
    split = split_segments(draft.output(x, None), context())
    assert segments(split) == [] and split(torch.ones(4))[1] is None


def piece(
    names: tuple[str, str] = ("a", "b"),
    *,
    shape: tuple[int, int] = SQUARE,
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
    scale: float = 2.0,
    op: object = aten.mm.default,
    swapped: bool = False,
) -> fx.GraphModule:
    draft = Draft()
    a, b = (draft.input(name, *shape, dtype=dtype) for name in names)
    if strided:
        a.meta["val"] = a.meta["val"].t()
    product = draft.call(op, *((b, a) if swapped else (a, b)))  # type: ignore[arg-type]
    return draft.output(draft.call(aten.mul.Tensor, product, scale))


def test_structure_ignores_names() -> None:
    assert structure(piece()) == structure(piece(("left", "right")))


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (5, 5)},
        {"dtype": torch.float64},
        {"strided": True},
        {"scale": 3.0},
        {"op": aten.add.Tensor},
        {"swapped": True},
    ],
    ids=str,
)
def test_structure_tells_apart_what_computes_something_else(other: dict) -> None:
    assert structure(piece()) != structure(piece(**other))


def test_structure_tells_apart_shapes_of_equal_strides() -> None:
    four, six = (piece(shape=(rows, 4), op=aten.add.Tensor) for rows in (4, 6))
    assert structure(four) != structure(six)


def test_equal_layers_are_compiled_once() -> None:
    """Three layers that differ in names only, in the middle of a graph."""
    draft = Draft()
    node = draft.input("x", *SQUARE)
    for i in range(4):
        w = draft.input(f"w{i}", *SQUARE, param=ParamRef(i, 0))
        node = draft.call(aten.mm.default, draft.call(aten.sin.default, node), w)
    split = split_segments(scheduled(draft.output(node)), context(*BUCKETS))
    compiler = SegmentCompiler("eager")
    for segment in segments(split):
        compiler(segment)
    assert (compiler.segments, compiler.compilations) == (4, 1)
