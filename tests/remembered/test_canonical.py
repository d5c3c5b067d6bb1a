"""Texts of values: equal where values are, and none for what another process may not have."""

from __future__ import annotations

import functools
import math
import operator
import types
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fxshard.config import Options, Precision
from fxshard.events import Phase
from fxshard.passes.context import ParamRef
from fxshard.passes.pipeline import PASSES
from fxshard.remembered.canonical import Unnamed, canonical

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


def same(a: Any, b: Any) -> bool:
    """Equal and of the same kinds: 1, 1.0 and True are three values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)  # 0.0 and -0.0 are two


@given(plain, plain)
def test_texts_are_equal_where_values_are(a: Any, b: Any) -> None:
    assert (canonical(a) == canonical(b)) == same(a, b)


@pytest.mark.parametrize(
    "value",
    [
        torch.float32,
        torch.device("cuda", 1),
        torch.contiguous_format,
        torch.Size([2, 3]),
        slice(1, None, 2),
        {3, 1, 2},
        types.MappingProxyType({"a": 1}),
        operator.add,
        math.sqrt,
        len,
        torch.sin,
        torch._C._nn.linear,
        F.rms_norm,
        F.scaled_dot_product_attention,
        torch.Tensor.add,
        torch.ops.aten.mm.default,
        torch.ops.aten.mm,
        torch.nn.Linear,
        Phase.FORWARD,
        ParamRef(1, 2),
        Options(),
        Options(passes=PASSES),
        Precision(param=torch.bfloat16),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_a_name(value: Any) -> None:
    assert canonical(value) == canonical(value) and hex(id(value))[2:] not in canonical(value)


def test_order_means_something_where_it_does() -> None:
    assert canonical({1, 2}) == canonical({2, 1})
    assert canonical({"a": 1, "b": 2}) != canonical({"b": 2, "a": 1})
    assert canonical((1, 2)) != canonical([1, 2]) != canonical([2, 1])


@dataclass
class Mine:
    value: int


class Own(Enum):
    ONE = 1


@functools.wraps(F.relu)
def pretends(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x,
        pretends,
        Mine(1),
        Mine,
        Own.ONE,
        object(),
        torch.ones(2),
        torch.nn.Linear(1, 1),
        functools.partial(F.relu),
        [1, {"a": (lambda: None,)}],
        Options(passes=PASSES.after("insert_unshard", lambda module, context: module)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_none(value: Any) -> None:
    with pytest.raises(Unnamed):
        canonical(value)
