"""Layers that are alike, and are not called alike: they are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.thorough import thorough
from tests.twins.models import Layer, Model, forward, passed_by, through


def flagged(self: Layer, x: Tensor, flag: Any) -> Tensor:
    return self.linear(x) * (2.0 if flag is True else 3.0)


@pytest.mark.parametrize("flag", [thorough(lambda i: i > 2), lambda i: i == 0 or 1])
def test_arguments_differ(flag: Callable[[int], Any]) -> None:
    """Also from True to 1."""

    def run(self: Model, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, flag(i))
        return x

    assert passed_by(through(run, forward(flagged))) == 0


def two(self: Layer, x: Tensor, y: Tensor) -> Tensor:
    return self.linear(x) * (2 if x is y else 3) * (1 if y.requires_grad else 2) + y.sum() / y.shape[0]


@pytest.mark.parametrize(
    "other",
    [
        lambda x, i: x if i == 0 else x * 1,
        thorough(lambda x, i: x[: 2 if i else 1] * 1),
        lambda x, i: x.detach() if i else x * 1,
        thorough(lambda x, i: (x.double() if i else x) * 1),
        thorough(lambda x, i: x * 1 if i else x.t().contiguous().t()),
    ],
    ids=["the same twice", "size", "gradient", "dtype", "strides"],
)
def test_tensors_differ(other: Callable[[Tensor, int], Tensor]) -> None:
    def run(self: Model, x: Tensor) -> Tensor:
        return sum(layer(x, other(x, i)) for i, layer in enumerate(self.layers)).float()  # type: ignore[attr-defined, return-value]

    assert passed_by(through(run, forward(two))) == 0


@pytest.mark.thorough
def test_the_order_differs() -> None:
    def run(self: Model, x: Tensor) -> Tensor:
        for layer in reversed(list(self.layers)):
            x = layer(x)
        return x

    assert passed_by(through(run)) == 0


def test_the_traced_layer_is_called_again_with_another_size() -> None:
    """What Dynamo is told of the others' results is what the first returned last."""

    def run(self: Model, x: Tensor) -> Tensor:
        total = self.layers[0](x).sum() + self.layers[0](x[:2] * 1).sum()
        for layer in list(self.layers)[1:]:
            result = layer(x)
            total = total + result.sum() / result.shape[0]
        return total

    assert passed_by(through(run)) == 0


def modes(self: Layer, x: Tensor) -> Tensor:
    return self.linear(x) * (2 if torch.is_grad_enabled() else 1)


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_differ(mode: Callable[[], Any]) -> None:
    """A layer may do something else there, and what it returns may be of another dtype."""

    def run(self: Model, x: Tensor) -> Tensor:
        with mode():
            total = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            result = layer(x)
            total = total.float() + result * (1 + 100 * torch.finfo(result.dtype).eps)
        return total

    assert passed_by(through(run, forward(modes))) == 0


def test_results_want_gradients_for_the_sake_of_parameters_alone() -> None:
    """Nothing that a layer is given tells that its result wants a gradient."""

    def run(self: Model, x: Tensor) -> Tensor:
        results = [layer(x.detach()) for layer in self.layers]
        return torch.stack(results[1:])

    assert passed_by(through(run)) == 0
