"""Layers that Dynamo passes by: what comes of tracing one of each kind is what comes of tracing all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxshard.repetition.twins import Twins
from tests.thorough import thorough
from tests.twins.models import ALL, LAYERS, WIDTH, Layer, Model, Normed, forward, passed_by, through


def without_gradient(self: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean()
    return self.linear(x) - mean


def in_place(self: Layer, x: Tensor) -> Tensor:
    x.mul_(0.5)
    return self.linear(x)


@pytest.mark.parametrize(
    "layer",
    [
        Layer,
        *(thorough(each) for each in (Normed, forward(without_gradient), forward(in_place))),
    ],
)
def test_layers_that_are_alike_are_passed_by(layer: type[nn.Module]) -> None:
    assert passed_by(lambda: Model(layer)) == ALL


def several(self: Layer, x: Tensor, pair: tuple[Tensor, Tensor], *, mask: Any, times: int) -> Any:
    return self.linear(x).tanh() * pair[0] + pair[1] * times, (x * 2, mask)


def test_what_layers_are_given_and_return_may_be_nested() -> None:
    def run(self: Model, x: Tensor) -> Tensor:
        a, b = x.detach().cos(), x.detach().sin()
        for i, layer in enumerate(self.layers):
            x, (twice, _) = layer(x, (a, b) if i % 2 else (b, a), mask=None, times=2)
            x = x + twice
        return x

    assert passed_by(through(run, forward(several))) == ALL


@pytest.mark.thorough
def test_layers_may_be_called_twice() -> None:
    def run(self: Model, x: Tensor) -> Tensor:
        return Model.through(self, Model.through(self, x) + self.layers[-1].linear.bias)

    assert passed_by(through(run)) == 2 * ALL


def test_the_layers_of_each_kind_follow_one_of_them() -> None:
    def make() -> Model:
        model = Model()
        for layer in list(model.layers)[::2]:
            layer.scale = 2.0
        return model

    assert passed_by(make) == LAYERS - 2


@pytest.mark.parametrize(
    "tie",
    [
        thorough(lambda layers: setattr(layers[2].linear, "weight", layers[1].linear.weight)),
        thorough(lambda layers: [setattr(layer.linear, "weight", layers[0].linear.weight) for layer in layers]),
        lambda layers: layers._modules.update({"4": layers[1], "5": layers[0]}),
    ],
    ids=["weights of two", "weights of all", "layers twice"],
)
def test_layers_may_share(tie: Callable[[Any], object]) -> None:
    def make() -> Model:
        model = Model()
        tie(model.layers)
        return model

    assert passed_by(make) == ALL


def test_where_something_is_frozen_the_first_layer_is_not_followed() -> None:
    """It is given what wants no gradient, and the others what does."""

    def make() -> Model:
        model = Model()
        model.first.requires_grad_(False)
        return model

    assert passed_by(make) == LAYERS - 2


@pytest.mark.thorough
def test_lists_in_layers_and_layers_in_few_layers() -> None:
    """Of lists in lists the outer counts, if it is long enough."""

    def many() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    model = Model(many)
    assert {len(path) for path in Twins(model).followers} == {2}
    model.layers = model.layers[:2]
    assert {len(path) for path in Twins(model).followers} == {3}
    assert passed_by(lambda: copy.deepcopy(model)) == 2 * ALL
