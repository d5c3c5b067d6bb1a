"""Which modules do the same to what they are called with, and what counts as a change to one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxshard.repetition.alike import Seen, alike, equal


def with_attribute(value: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    module.extra = value
    return module


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.0, 1.0, "a", "b", torch.float32]),
    lambda inner: st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)


@given(VALUES, VALUES)
def test_modules_are_alike_if_their_attributes_look_the_same(one: Any, other: Any) -> None:
    """``repr`` tells 1 from 1.0 and True, and a list from a tuple."""
    assert alike(with_attribute(one), with_attribute(other)) == (repr(one) == repr(other))
    assert equal(one, copy.deepcopy(one))


@pytest.mark.parametrize(
    "other",
    [
        nn.Linear(2, 2, bias=False),
        nn.Linear(2, 3),
        nn.Linear(2, 2, dtype=torch.float64),
        nn.Linear(2, 2, device="meta"),
        nn.Linear(2, 2).requires_grad_(False),
        nn.Linear(2, 2).eval(),
        nn.Bilinear(2, 2, 2),
        type("Linear", (nn.Linear,), {})(2, 2),
        with_attribute(1),
    ],
    ids=["missing", "shape", "dtype", "device", "frozen", "mode", "class", "subclass", "attribute"],
)
def test_modules_that_are_not_alike(other: nn.Module) -> None:
    assert alike(nn.Linear(2, 2), nn.Linear(2, 2))
    for one, two in [(nn.Linear(2, 2), other), (other, nn.Linear(2, 2))]:
        assert not alike(one, two)
        assert not alike(nn.Sequential(one), nn.Sequential(two))


def test_objects_are_alike_only_if_they_are_one() -> None:
    """Nobody knows what is in them."""
    shared = object()
    assert alike(with_attribute([shared]), with_attribute([shared]))
    assert not alike(with_attribute([object()]), with_attribute([object()]))


def test_what_is_shared_inside_counts() -> None:
    def pair(shared: bool) -> nn.Module:
        first = nn.Linear(2, 2)
        return nn.Sequential(first, first if shared else nn.Linear(2, 2))

    def tied(shared: bool) -> nn.Module:
        made = pair(False)
        if shared:
            made[1].weight = made[0].weight  # type: ignore[index]
        return made

    for make in (pair, tied):
        assert alike(make(True), make(True))
        assert not alike(make(True), make(False))
        assert not alike(make(False), make(True))


def changes() -> dict[str, Callable[[Any], object]]:
    return {
        "value": lambda module: setattr(module, "extra", 1),
        "new": lambda module: setattr(module, "more", 1),
        "gone": lambda module: delattr(module, "extra"),
        "renamed": lambda module: module.__dict__.update(more=module.__dict__.pop("extra")),
        "member": lambda module: module.extra["a"].append(1),
        "nested": lambda module: module.extra["b"][0].add(1),
        "key": lambda module: module.extra.update(c=module.extra.pop("d")),
        "hook": lambda module: module.register_forward_hook(print),
        "parameter": lambda module: setattr(module, "weight", nn.Parameter(torch.ones(2, 2))),
        "mode": lambda module: module.eval(),
        "class": lambda module: setattr(module, "__class__", type("Other", (nn.Linear,), {})),
    }


@pytest.mark.parametrize("change", changes().values(), ids=changes())
def test_changes_are_seen(change: Callable[[Any], object]) -> None:
    module = with_attribute({"a": [], "b": (set(),), "d": 2})
    seen = Seen([module])
    assert seen.lasts()
    change(module)
    assert not seen.lasts()


def test_new_values_of_tensors_are_no_change() -> None:
    module = nn.BatchNorm1d(2)
    seen = Seen([module])
    module(torch.randn(3, 2)).sum().backward()
    torch.optim.SGD(module.parameters()).step()
    assert seen.lasts()
