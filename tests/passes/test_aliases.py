"""Aliases: which nodes share memory, checked against the memory itself."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxshard.schedule.aliases import is_view, readers
from tests.passes.graphs import Draft, aten

CASES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (aten.view.default, ([2, 12],)),
    (aten.t.default, ()),
    (aten.permute.default, ([1, 0],)),
    (aten.expand.default, ([4, 6],)),
    (aten.slice.Tensor, (0, 1, 3)),
    (aten.select.int, (0, 1)),
    (aten.as_strided.default, ([3], [2], 1)),
    (aten.alias.default, ()),
    (aten.detach.default, ()),
    (aten.unsqueeze.default, (0,)),
    (aten._unsafe_view.default, ([24],)),
    (aten.split.Tensor, (2,)),
    (aten.split_with_sizes.default, ([1, 3],)),
    (aten.unbind.int, ()),
    (aten.unsafe_split.Tensor, (2,)),
    (aten.unsafe_split_with_sizes.default, ([1, 3],)),
    (aten.clone.default, ()),
    (aten.sin.default, ()),
    (aten._to_copy.default, ()),
    (aten.topk.default, (2,)),
    (aten.cat.default, ()),
]


@pytest.mark.parametrize("op, args", CASES, ids=lambda case: str(case) if callable(case) else "")
def test_a_view_is_what_shares_storage(op: Callable[..., Any], args: tuple[Any, ...]) -> None:
    listed = op is aten.cat.default
    draft, x = Draft(), torch.randn(4, 6)
    given = draft.input("x", 4, 6)
    node = draft.call(op, [given] if listed else given, *args)
    result = op([x] if listed else x, *args)
    if not isinstance(result, torch.Tensor):
        node, result = draft.call(operator.getitem, node, 0), result[0]
    assert is_view(node) == (result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())


def test_inputs_and_python_functions_are_no_views() -> None:
    draft = Draft()
    x = draft.input("x", 4)
    assert not is_view(x)
    assert not is_view(draft.graph.call_function(len, (x,)))


def test_readers_follow_views_and_stop_at_computation() -> None:
    draft = Draft()
    x = draft.input("x", 4, 6)
    transposed = draft.call(aten.t.default, x)
    viewed = draft.call(aten.slice.Tensor, transposed, 0, 0, 3)
    halves = draft.call(aten.split.Tensor, viewed, 2, 1)
    half = draft.call(operator.getitem, halves, 1)
    sin = draft.call(aten.sin.default, half)
    cos = draft.call(aten.cos.default, sin)  # reads the sine's memory, not x's
    exp = draft.call(aten.exp.default, x)
    module = draft.output(cos, exp, transposed)
    found = readers([x])
    assert set(found) == {transposed, viewed, halves, half, sin, exp, module.graph.output_node()}
    assert len(found) == len(set(found))
    assert set(readers([half])) == {sin}
