"""Shard boundaries of quantized weights fall between groups of 32 rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard._torch.errors import LayoutError
from fxshard.planner.layout import Layout, Slot, TensorSpec
from fxshard.planner.rows import row_layout

matrices = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6)


@given(matrices, st.sampled_from([1, 2, 3, 4, 8]))
def test_every_owner_holds_whole_blocks(sizes: list[tuple[int, int]], ranks: int) -> None:
    specs = [TensorSpec(f"w{i}", (32 * rows, 32 * columns), 32) for i, (rows, columns) in enumerate(sizes)]
    layout = row_layout(specs, ranks)
    for rank in range(ranks):
        for fragment in layout.fragments(rank):
            assert fragment.rows % 32 == 0 and fragment.row_start % 32 == 0
            assert fragment.offset % 64 == 0  # so that its scales start at a whole byte
    held = {spec.name: sum(layout.fragment(rank, spec.name).rows for rank in range(ranks)) for spec in specs}
    assert held == {spec.name: spec.rows for spec in specs}


def test_a_boundary_inside_a_group_of_rows_is_an_error() -> None:
    spec = TensorSpec("w", (64, 64), 32)
    with pytest.raises(LayoutError, match="cuts a group of 32 rows of w in two"):
        Layout(2, 48 * 64, (Slot(spec, 0),))
