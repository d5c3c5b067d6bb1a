"""Layouts: where parameters sit in a bucket, against a bucket built and cut by hand."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxshard._torch.errors import LayoutError
from fxshard.planner.layout import ALIGNMENT, Layout, Slot, TensorSpec, aligned, require_all_placed
from fxshard.planner.rows import row_layout
from fxshard.planner.whole import whole_layout

Shape = tuple[int, ...]
Make = Callable[[Sequence[TensorSpec], int], Layout]

MAKERS = pytest.mark.parametrize("make", [row_layout, whole_layout])
RANKS = [1, 2, 3, 4, 8, 64]

# Rows that fit the alignment, that share a factor with it, and that share none.
row_shapes = st.one_of(
    st.just(()),
    st.tuples(st.sampled_from([1, 3, 7, 13, 32, 64, 96, 100, 128, 147, 1001])),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
shapes = st.tuples(st.integers(0, 90), row_shapes).map(lambda pair: (pair[0], *pair[1]))
models = st.lists(shapes, min_size=1, max_size=9)


def named(shapes: Sequence[Shape]) -> list[TensorSpec]:
    return [TensorSpec(f"p{i}", shape) for i, shape in enumerate(shapes)]


def values(specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """A tensor per parameter in which no number occurs twice, here or in another parameter."""
    full, start = {}, 0
    for spec in specs:
        full[spec.name] = torch.arange(start, start + spec.numel).view(spec.shape)
        start += spec.numel
    return full


def cut(layout: Layout, full: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """What each rank gets: the bucket filled at the slots' offsets and cut in equal pieces. -1 is padding."""
    bucket = torch.full((layout.numel,), -1)
    for slot in layout.slots:
        assert (bucket[slot.offset : slot.offset + slot.spec.numel] == -1).all(), "two parameters in one place"
        bucket[slot.offset : slot.offset + slot.spec.numel] = full[slot.spec.name].flatten()
    return torch.tensor_split(bucket, layout.ranks)


@MAKERS
@pytest.mark.shows("L2", "L9", "L13")
@settings(max_examples=120)
@given(shapes=models, ranks=st.sampled_from(RANKS))
@example(shapes=[(3, 0), (2, 5)], ranks=2)
@example(shapes=[(0,)], ranks=8)
def test_fragments_are_what_the_pieces_of_the_bucket_hold(make: Make, shapes: list[Shape], ranks: int) -> None:
    specs = named(shapes)
    layout, full = make(specs, ranks), values(specs)
    pieces = cut(layout, full)
    assert {len(piece) for piece in pieces} == {layout.shard_numel}
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.slots)
    for spec in specs:
        next_row = 0
        for rank, piece in enumerate(pieces):
            fragment = layout.fragment(rank, spec.name)
            assert (fragment.rows == 0 and fragment.row_start in (0, spec.rows)) or fragment.row_start == next_row
            next_row += fragment.rows
            held = piece[fragment.offset : fragment.offset + fragment.numel]
            assert torch.equal(held, full[spec.name][fragment.row_start : fragment.row_stop].flatten())
        assert next_row == spec.rows


@MAKERS
@settings(max_examples=60)
@given(shapes=models, ranks=st.sampled_from(RANKS))
def test_slots_and_gaps_tile_the_bucket(make: Make, shapes: list[Shape], ranks: int) -> None:
    layout = make(named(shapes), ranks)
    covered = torch.zeros(layout.numel, dtype=torch.int)
    for slot in layout.slots:
        covered[slot.offset : slot.end] += 1
    padding = covered == 0
    assert int(padding.sum()) == layout.padding
    found = torch.zeros_like(covered)
    for offset, numel in layout.gaps():
        assert numel > 0
        found[offset : offset + numel] += 1
    assert torch.equal(found, padding.int())


@settings(max_examples=120)
@given(shapes=models, ranks=st.sampled_from(RANKS))
@example(shapes=[(3, 1001)] * 10, ranks=8)
def test_rows_are_never_worse_than_not_cutting_at_all(shapes: list[Shape], ranks: int) -> None:
    """Rows that cannot end at an aligned place are not cut: then whole parameters, packed in order, are the bound."""
    specs = named(shapes)
    sizes = [aligned(spec.numel) for spec in specs]

    def fits(length: int) -> bool:
        shards, used = 1, 0
        for size in sizes:
            shards, used = (shards, used + size) if used + size <= length else (shards + 1, size)
        return shards <= ranks

    bound = next(n for n in range(max(sizes), sum(sizes) + 1, ALIGNMENT) if fits(n))
    assert row_layout(specs, ranks).shard_numel <= bound


@pytest.mark.shows("L1", "L7")
@settings(max_examples=120)
@given(shapes=models, ranks=st.sampled_from(RANKS))
def test_whole_layout_gives_every_parameter_to_its_owner(shapes: list[Shape], ranks: int) -> None:
    specs = named(shapes)
    layout = whole_layout(specs, ranks)
    for spec in specs:
        rows = [layout.fragment(rank, spec.name).rows for rank in range(ranks)]
        assert rows == [spec.rows if rank == layout.owner(spec.name) else 0 for rank in range(ranks)]


@MAKERS
@pytest.mark.shows("L7")
@given(shapes=models, ranks=st.sampled_from(RANKS))
@settings(max_examples=60)
def test_slots_alone_decide_who_owns_what(make: Make, shapes: list[Shape], ranks: int) -> None:
    """The same slots written down elsewhere give the same owners and fragments, and the owner is where a row 0 is."""
    specs = named(shapes)
    layout = make(specs, ranks)
    again = Layout(ranks, layout.shard_numel, tuple(Slot(s.spec, s.offset) for s in layout.slots))
    assert [again.fragments(rank) for rank in range(ranks)] == [layout.fragments(rank) for rank in range(ranks)]
    for spec in specs:
        holders = [r for r in range(ranks) if (f := again.fragment(r, spec.name)).rows and f.row_start == 0]
        assert holders == ([layout.owner(spec.name)] if spec.rows else [])


def block(dim: int, kv: int, hidden: int, layer: int = 0) -> list[TensorSpec]:
    """The parameters of a Llama layer."""
    of = {"norm1": (dim,), "q": (dim, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, dim), "norm2": (dim,)}
    of |= {"w1": (hidden, dim), "w3": (hidden, dim), "w2": (dim, hidden)}
    return [TensorSpec(f"{layer}.{name}", shape) for name, shape in of.items()]


@pytest.mark.parametrize(
    "dim, kv, hidden", [(4096, 1024, 14336), (4096, 4096, 11008), (2048, 256, 11008), (896, 128, 4864)]
)
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_llama_layer_wastes_less_than_a_percent_in_rows(dim: int, kv: int, hidden: int, ranks: int) -> None:
    layout = row_layout(block(dim, kv, hidden), ranks)
    wasted = layout.padding / sum(slot.spec.numel for slot in layout.slots)
    assert wasted < (0.01 if ranks <= 8 else 0.03)


@pytest.mark.shows("L3")
@pytest.mark.parametrize("layers, ranks", [(8, 8), (8, 4), (16, 8), (6, 3), (3, 1), (64, 64)])
def test_identical_blocks_leave_no_padding(layers: int, ranks: int) -> None:
    layout = whole_layout([spec for i in range(layers) for spec in block(256, 64, 704, layer=i)], ranks)
    assert layout.padding == 0
    assert layout.gaps() == ()


@pytest.mark.shows("L4")
def test_equal_parameters_are_dealt_out_before_others() -> None:
    """First-come packing would put the large one and a peerless small one on rank 0 and two matrices on rank 1."""
    specs = named([(64, 256), (64, 64), (64, 64), (64, 64), (64, 64), (64, 192), (64, 64)])
    layout = whole_layout(specs, 2)
    owners = {spec.name: layout.owner(spec.name) for spec in specs}
    assert sorted(owners[f"p{i}"] for i in (1, 2, 3, 4)) == [0, 0, 1, 1]
    assert owners["p0"] != owners["p5"] == owners["p6"]
    assert layout.padding == 0


@pytest.mark.shows("L4")
def test_dealing_out_peers_beats_packing_largest_first() -> None:
    """Largest first gives 9 + 6 and 7 + 7 + 3; with the two sevens apart it is 7 + 9 and 7 + 6 + 3."""
    layout = whole_layout(named([(6, 64), (7, 64), (3, 64), (7, 64), (9, 64)]), 2)
    assert layout.owner("p1") != layout.owner("p3")
    assert layout.shard_numel == 16 * 64


@pytest.mark.shows("L4")
def test_a_large_parameter_is_packed_around_with_small_ones() -> None:
    """One matrix as large as six small ones: the small ones fill the other ranks to its height."""
    layout = whole_layout(named([(32, 64), (192, 64)] + [(32, 64)] * 11), 3)
    assert layout.shard_numel == 192 * 64
    assert [f.name for f in layout.fragments(layout.owner("p1")) if f.numel] == ["p1"]
    assert layout.padding == 0


def slots(*places: tuple[Shape, int]) -> tuple[Slot, ...]:
    return tuple(Slot(TensorSpec(f"p{i}", shape), offset) for i, (shape, offset) in enumerate(places))


@pytest.mark.shows("L1")
def test_a_whole_layout_with_a_crossing_is_refused() -> None:
    crossing = slots(((64,), 0), ((2, 64), 64))
    assert [f.rows for f in Layout(2, 128, crossing).fragments(0)] == [64, 1]
    with pytest.raises(LayoutError, match="p1 crosses the shard boundary at 128"):
        Layout(2, 128, crossing, whole=True)


@pytest.mark.shows("L2")
@pytest.mark.parametrize(
    "shard, places, message",
    [
        (128, [((10,), 0), ((10,), 32)], "p1 starts at 32, not a multiple of 64"),
        (100, [((10,), 0)], "shard length 100 is not a multiple of 64"),
        (128, [((65,), 0), ((10,), 64)], "p1 at 64 overlaps what ends at 65"),
        (128, [((10,), 64), ((10,), 0)], "p1 at 0 overlaps"),
        (128, [((10,), -64)], "p0 at -64 overlaps"),
        (64, [((129,), 0)], "ends at 129, after the bucket's 128"),
    ],
)
def test_a_misplaced_parameter_is_refused(shard: int, places: list[tuple[Shape, int]], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout(2, shard, slots(*places))


@pytest.mark.shows("L13")
@pytest.mark.parametrize("shape, boundary", [((3, 48), 64), ((2, 100), 64), ((5, 64 + 32), 128)])
def test_a_boundary_inside_a_row_is_refused(shape: Shape, boundary: int) -> None:
    with pytest.raises(LayoutError, match=f"boundary at {boundary} cuts a row of p0"):
        Layout(8, boundary, slots((shape, 0)))


@pytest.mark.shows("L8")
def test_a_missing_foreign_or_doubled_parameter_is_refused() -> None:
    specs = named([(4, 4), (4,)])
    layout = row_layout(specs, 2)
    assert require_all_placed(specs, layout) is layout
    with pytest.raises(LayoutError, match=r"not placed: \['p2'\]"):
        require_all_placed([*specs, TensorSpec("p2", (1,))], layout)
    with pytest.raises(LayoutError, match=r"placed without being asked: \['p1'\]"):
        require_all_placed(specs[:1], layout)
    with pytest.raises(LayoutError, match=r"placed more than once: \['p0'\]"):
        Layout(1, 128, (Slot(specs[0], 0), Slot(specs[0], 64)))


@MAKERS
@pytest.mark.shows("L8")
def test_a_parameter_given_twice_is_refused(make: Make) -> None:
    with pytest.raises(LayoutError):
        make([TensorSpec("w", (4, 4)), TensorSpec("b", (4,)), TensorSpec("w", (4, 4))], 2)
