"""Which tensor-parallel rank orthogonalizes which matrix, and what they send each other for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.planner.matrices import matrix_cost
from fxshard.planner.model_groups import ModelGroup
from fxshard.planner.parts import Cuts, Part, Parts, Whole

TP = ModelGroup("tp", 4)


def test_along_which_dimension_a_matrix_is_cut() -> None:
    shapes = {"up": (32, 6), "down": (8, 24), "stack": (3, 8, 24), "experts": (12, 8, 6), "both": (32, 24)}
    cuts = Cuts(TP, tuple(Whole(*each) for each in shapes.items()))
    assert [cuts.dim(name, (8, 6)) for name in ("up", "down", "both")] == [0, 1, None]
    assert cuts.dim("stack", (3, 8, 6)) == 2 and cuts.dim("experts", (3, 8, 6)) is None
    assert cuts.dim("up", (16, 6)) is None and cuts.dim("up", (8, 6, 1)) is None and cuts.dim("up", (32, 6)) is None


def test_the_matrices_of_one_bucket() -> None:
    cuts = Cuts(TP, (Whole("a", (8, 2)), Whole("b", (4, 8)), Whole("c", (16, 4))))
    some = cuts.of(("c", "norm", "a"))
    assert some is not None and [each.name for each in some.wholes] == ["c", "a"]
    assert cuts.of(("norm",)) is None


sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 1)), min_size=1, max_size=12)


@pytest.mark.shows("T4")
@given(sizes=sizes, ranks=st.integers(2, 5))
def test_every_part_arrives_once_and_work_is_even(sizes: list[tuple[int, int, int]], ranks: int) -> None:
    members = tuple(Part(str(i), (rows, columns), dim) for i, (rows, columns, dim) in enumerate(sizes))
    parts = Parts(ModelGroup("tp", ranks), members)
    assert sorted(i for rank in range(ranks) for i in parts.owned(rank)) == list(range(len(members)))
    assert sum(parts.to_owners()) == sum(part.numel for part in members)
    for sender in range(ranks):
        for getter in range(ranks):  # what one sends to another is what that expects from it
            assert parts.to_owners()[getter] == parts.from_each(getter)[sender]
    assert [parts.owners[i] for i in parts.order] == sorted(parts.owners)
    assert parts.most == max(sum(parts.from_each(rank)) for rank in range(ranks))
    costs = [matrix_cost(part.whole(ranks)) for part in members]
    loads = [sum(costs[i] for i in parts.owned(rank)) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(costs)
