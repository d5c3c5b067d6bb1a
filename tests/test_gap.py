"""A captured graph with one node in place of all that it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxshard import _compat
from fxshard.repetition.gap import everything
from tests.capturing import captured

WEIGHT = nn.Parameter(torch.ones(3))


def loss(x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x * WEIGHT).tanh()
    return y.square().mean(), y.detach().argmax(-1)


def test_inputs_outputs_and_gradients_are_those_of_the_graph() -> None:
    gapped = everything(captured(loss, torch.ones(2, 3)))
    assert gapped is not None
    assert len([node for node in gapped.graph.nodes if node.op == "call_module"]) == 1
    x = torch.ones(2, 3)
    order = [node.meta["example_value"].shape for node in gapped.graph.find_nodes(op="placeholder")]
    first, second = gapped(*[x if shape == (2, 3) else WEIGHT for shape in order])
    assert first.shape == () and first.requires_grad and not second.requires_grad
    assert second.shape == (2,) and second.dtype == torch.int64
    (gradient,) = torch.autograd.grad(first, WEIGHT)
    assert gradient.shape == WEIGHT.shape


def view(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 2).sum() + x.t().sum(), x.t()


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y.t()


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    first, second = y.split([1, 1])
    return second, (first * second).sum()


def number(x: Tensor) -> tuple[Tensor, int]:
    return x * 2, x.shape[0]


def itself(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x * 2


@pytest.mark.parametrize("run", [view, twice, split, number])
def test_what_shares_memory_shares_it(run: Callable[..., Any]) -> None:
    """With what is given, too. A caller may write to a result of its own, and autograd asks whether it is a view."""
    x = torch.randn(2, 2, requires_grad=True)
    gapped = everything(captured(run, x))
    assert gapped is not None
    plain, mine = [value for value in run(x) if isinstance(value, Tensor)], gapped(x)
    assert len(mine) == len(plain)
    for a, b in zip(mine, plain, strict=True):
        assert (a.shape, a.stride(), a._is_view()) == (b.shape, b.stride(), b._is_view())
        assert _compat.share_memory(a, x) == _compat.share_memory(b, x)


def test_a_new_tensor_that_nobody_can_tell_from_another_is_not_left_out() -> None:
    """Dynamo's values do not say that two results are one piece of memory, other than as a view of it."""
    graph = captured(itself, torch.ones(2, 3, requires_grad=True))
    (product,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    product.meta["example_value"] = graph.graph.find_nodes(op="placeholder")[0].meta["example_value"]
    assert everything(graph) is None
