"""Layers that do what a copy could not: they are traced."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxshard.repetition import stand_ins
from fxshard.repetition.twins import Twins
from tests.thorough import thorough
from tests.twins.models import LAYERS, WIDTH, Layer, Model, forward, passed_by, through


def collects(self: Layer, x: Tensor, found: Any) -> Tensor:
    y = self.linear(x)
    found.append(y.abs().mean())
    return x + y


def test_a_list_that_layers_write_to() -> None:
    """A layer that is not traced would not write to it."""

    def run(self: Model, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, found)
        return x + sum(found)

    assert passed_by(through(run, forward(collects))) == 0


def tells(self: Layer, x: Tensor, found: dict[str, int]) -> Tensor:
    found["times"] = 3
    return self.linear(x)


@pytest.mark.thorough
def test_a_dict_that_is_made_anew_for_each_layer() -> None:
    def run(self: Model, x: Tensor) -> Tensor:
        for layer in self.layers:
            found = {"times": 1}
            x = layer(x, found) * found["times"]
        return x

    assert passed_by(through(run, forward(tells))) == 0


def counts(self: Layer, x: Tensor) -> Tensor:
    self.scale += 1.0
    return self.linear(x) * self.scale


def appends(self: Layer, x: Tensor) -> Tensor:
    self.found.append(1)
    return self.linear(x) * len(self.found)


def draws(self: Layer, x: Tensor) -> Tensor:
    return self.linear(x) * random.uniform(1, 2)


def hooks(self: Layer, x: Tensor) -> Tensor:
    y = self.linear(x)
    y.register_hook(lambda gradient: gradient * 2)
    return y


@pytest.mark.parametrize("run", [counts, *(thorough(run) for run in (appends, draws, hooks))])
def test_layers_that_do_more_than_compute(run: Callable[..., Tensor]) -> None:
    assert passed_by(lambda: Model(forward(run))) == 0


def itself(self: Layer, x: Tensor) -> Tensor:
    return x


def weight(self: Layer, x: Tensor) -> Tensor:
    return self.linear.weight


def part(self: Layer, x: Tensor) -> Tensor:
    return self.linear.weight.t()


def test_layers_that_return_what_they_were_given() -> None:
    assert passed_by(lambda: Model(forward(itself))) == 0


@pytest.mark.parametrize("run", [weight, thorough(part)])
def test_layers_that_return_parameters(run: Callable[..., Tensor]) -> None:
    def through_weights(self: Model, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x @ layer(x) + layer.linear.bias
        return x

    assert passed_by(through(through_weights, forward(run))) == 0


def recomputes(self: Layer, x: Tensor) -> Tensor:
    return x + checkpoint(lambda x: self.linear(x).tanh(), x, use_reentrant=False)


@pytest.mark.thorough
def test_graphs_in_layers_and_layers_in_graphs() -> None:
    """Checkpointing has a graph of its own, in which layers are not written out."""

    def run(self: Model, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    assert passed_by(lambda: Model(forward(recomputes))) == 0
    assert passed_by(through(run)) == 0
    assert not stand_ins._RESULTS, "what a failed capture leaves behind is forgotten"


def test_a_parameter_of_the_traced_layer_that_is_somebody_elses_too() -> None:
    """Where the traced layer uses it nobody can tell as whose."""

    def run(self: Model, x: Tensor) -> Tensor:
        return self.last(Model.through(self, x))  # type: ignore[operator]

    def make() -> Model:
        model = through(run)()
        model.last = nn.Linear(WIDTH, WIDTH)
        model.last.weight = model.layers[0].linear.weight
        return model

    assert passed_by(make) == 0


class Knowing(Layer):
    """Layers that have a module or a parameter of one of them, other than as their own."""

    known: tuple[Any, ...]

    def forward(self, x: Tensor) -> Tensor:
        (known,) = self.known
        return x + self.linear(x) * (known if isinstance(known, Tensor) else known.bias)


@pytest.mark.parametrize(("name", "passed"), [("linear", 0), ("linear.bias", LAYERS - 2)])
def test_layers_that_know_the_first_one(name: str, passed: int) -> None:
    """In the first it is its own as well, which in a copy would become the copy's."""

    def make() -> Model:
        model = Model(Knowing)
        module, _, parameter = name.partition(".")
        known = getattr(model.layers[0], module)
        for layer in model.layers:
            layer.known = (getattr(known, parameter) if parameter else known,)  # type: ignore[assignment]
        return model

    assert passed_by(make) == passed


def test_a_model_that_knows_one_of_its_layers() -> None:
    """It must find the layer, not its twin, when it looks for it."""

    def run(self: Model, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * (3 if layer is self.known[0] else 1)  # type: ignore[index]
        return x

    def make() -> Model:
        model = through(run)()
        model.known = (model.layers[3],)  # type: ignore[assignment]
        return model

    assert passed_by(make) == 0


class Slotted(Layer):
    __slots__ = ("times",)


class Listed(Layer, list[int]):
    __hash__ = object.__hash__


@pytest.mark.parametrize("layer", [Slotted, Listed])
def test_modules_with_more_than_attributes_have_no_twins(layer: type[nn.Module]) -> None:
    """Layers, and modules that have layers."""
    assert Twins(nn.Sequential(Model())).followers
    assert not Twins(Model(layer)).followers
    assert not Twins(type("Root", (layer, Model), {"__init__": Model.__init__})()).followers
