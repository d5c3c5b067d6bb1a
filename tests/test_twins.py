"""Dynamo traces one layer of each kind, and what comes of it is what comes of tracing all of them."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.repetition import stand_ins
from fxshard.repetition.twins import Twins
from tests.thorough import thorough

WIDTH, LAYERS, STEPS = 4, 6, 2
ALL = LAYERS - 1
"""All but the first are passed by."""


class Layer(nn.Module):
    """What the layers of these tests are made of: a product, something to set, and something nested to set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = 1.0
        self.options = {"inner": {"scale": 1.0}}
        self.found: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * self.scale * self.options["inner"]["scale"]


class Model(nn.Module):
    """Layers behind something that makes what they are given want a gradient, as an embedding does."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.scale = 1.0
        self.extra = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.through(self.first(x)) * self.scale * getattr(self, "extra", 1.0)).square().mean()

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int, size: int = 3) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, change: Callable[[Any], object] | None) -> list[Tensor]:
    """Losses and gradients of steps, with a change to the model behind the first."""
    left = []
    for step in range(STEPS):
        torch.manual_seed(step)
        random.seed(step)
        loss = model(batch(step))
        loss.backward()
        left += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        if change is not None and step == 0:
            change(getattr(model, "_inner", model))
    return [*left, *(buffer.clone() for buffer in model.buffers())]


def passed_by(make: Callable[[], nn.Module], change: Callable[[Any], object] | None = None) -> int:
    """How many layers Dynamo passed by, having checked that training gives what plain PyTorch gives, and if there were
    any the bits of tracing them all. After a change it may not: Dynamo itself does not see each one.
    """
    torch.manual_seed(0)
    plain = make()
    found, model = compiled(plain, change, once=True)
    passed = model.compilations.layers_passed_by
    if passed and change is None:
        whole, other = compiled(plain, change, once=False)
        assert other.compilations.layers_passed_by == 0
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), change)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    return passed


def compiled(
    plain: nn.Module, change: Callable[[Any], object] | None, *, once: bool
) -> tuple[list[Tensor], fxshard.ShardedModule]:
    model = fxshard.compile(copy.deepcopy(plain), optimizer=fxshard.AdamW(lr=1e-2), lowering="eager", trace_once=once)
    return train(model, model.optimizer, change), model


def forward(run: Callable[..., Any]) -> type[Layer]:
    """A class of layers with another forward."""
    return type("Other", (Layer,), {"forward": run})


def through(run: Callable[..., Any], layer: Callable[[], nn.Module] = Layer) -> Callable[[], Model]:
    """A model that calls its layers in another way."""
    return lambda: type("Other", (Model,), {"through": run})(layer)


# -- layers that are passed by ---------------------------------------------------------------------------------------


class Normed(Layer):
    """Layers that write to buffers and draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.norm(self.linear(x)))


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


# -- layers that are called differently ------------------------------------------------------------------------------


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


# -- layers that do what a copy could not ----------------------------------------------------------------------------


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


# -- what is changed later -------------------------------------------------------------------------------------------


def change_all(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: [setattr(layer, name, value) for layer in model.layers] and None


CHANGES_TO_ALL: dict[str, Callable[[Any], object]] = {
    "model": lambda model: setattr(model, "scale", 3.0),
    "deleted": lambda model: delattr(model, "extra"),
    "layers": change_all("scale", 3.0),
    "inside": lambda model: [layer.options["inner"].update(scale=3.0) for layer in model.layers],
}


@pytest.mark.parametrize("change", CHANGES_TO_ALL.values(), ids=CHANGES_TO_ALL)
def test_a_change_to_the_model_or_to_all_layers_is_taken_over(change: Callable[[Any], object]) -> None:
    twins = Twins(model := Model())
    change(model)
    assert twins.keep_up()
    assert torch.equal(twins.leaders["layers", "0"](ones := torch.ones(WIDTH)), model.layers[0](ones))
    twin = twins.model
    assert (twin.scale, hasattr(twin, "extra")) == (model.scale, hasattr(model, "extra"))
    assert [layer.scale for layer in twin.layers] == [layer.scale for layer in model.layers]


def double(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result * 2


class Doubled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


CHANGES_TO_ONE: dict[str, Callable[[Any], object]] = {
    "attribute": lambda layers: setattr(layers[3], "scale", 3.0),
    "of the first": lambda layers: setattr(layers[0], "scale", 3.0),
    "inside": lambda layers: layers[3].options["inner"].update(scale=3.0),
    "inside the first": lambda layers: layers[0].options["inner"].update(scale=3.0),
    "hook": lambda layers: layers[3].register_forward_hook(double),
    "hook on the first": lambda layers: layers[0].register_forward_hook(double),
    "hook inside": lambda layers: layers[3].linear.register_forward_hook(double),
    "mode": lambda layers: layers[3].linear.eval(),
    "forward": lambda layers: setattr(layers[3], "forward", lambda x: x * 2),
    "class": lambda layers: setattr(layers[3], "__class__", Doubled),
    "all classes": lambda layers: [setattr(layer, "__class__", Doubled) for layer in layers],
    "one less": lambda layers: layers.pop(-1),
    "swapped": lambda layers: layers._modules.update({"1": layers[3], "3": layers[1]}),
    "swapped inside": lambda layers: layers[1]._modules.update(linear=layers[3].linear),
    "known": lambda layers: setattr(layers, "known", [layers[3]]),
}


@pytest.mark.parametrize("change", CHANGES_TO_ONE.values(), ids=CHANGES_TO_ONE)
def test_after_a_change_to_one_layer_there_is_no_twin(change: Callable[[Any], object]) -> None:
    twins = Twins(model := Model())
    assert twins.keep_up()
    change(model.layers)
    assert not twins.keep_up()


def test_changes_reach_what_is_computed() -> None:
    assert passed_by(Model, CHANGES_TO_ALL["deleted"]) == 2 * ALL
    assert passed_by(Model, lambda model: CHANGES_TO_ONE["hook"](model.layers)) == ALL


@pytest.mark.thorough
def test_a_mode_is_that_of_a_layer() -> None:
    """One that drops nothing any more is not like the others; all of them are like each other again."""
    torch.manual_seed(0)
    plain = Model(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))
    model = fxshard.compile(copy.deepcopy(plain), lowering="eager")

    def same() -> int:
        results = []
        for each in (model, plain):
            torch.manual_seed(1)
            results.append(each(batch(0)))
        torch.testing.assert_close(*results)
        return model.compilations.layers_passed_by

    assert same() == ALL
    model.eval(), plain.eval()
    assert same() == 2 * ALL
    model.train(), plain.train()
    assert same() == 2 * ALL, "captured before"
    model.layers[3].eval(), plain.layers[3].eval()
    assert same() == 2 * ALL, "everything is traced"


@pytest.mark.parametrize(("dtype", "lasts"), [(torch.float32, True), (torch.float64, False)])
def test_a_buffer_may_be_replaced_by_one_of_its_kind(dtype: torch.dtype, lasts: bool) -> None:
    twins = Twins(model := Model(Normed))
    model.layers[3].norm.running_mean = torch.ones(WIDTH, dtype=dtype)
    assert twins.keep_up() == lasts


def test_hooks_on_all_modules() -> None:
    """They are called with a layer that is not traced, too, and in a copy of the one that is."""
    hook = register_module_forward_hook(
        lambda module, args, result: result * 2 if isinstance(module, Layer) else result
    )
    try:
        assert passed_by(Model) == 0
    finally:
        hook.remove()


def test_sizes_that_are_not_known() -> None:
    """The second size is captured with symbolic ones, for which a layer may find something out that others do not."""
    torch.manual_seed(0)
    plain = Model()
    model = fxshard.compile(copy.deepcopy(plain), lowering="eager")
    for size in (3, 5):
        torch.testing.assert_close(model(batch(0, size)), plain(batch(0, size)))
    assert model.compilations.layers_passed_by == ALL


def test_without_gradients() -> None:
    torch.manual_seed(0)
    plain = Model()
    model = fxshard.compile(copy.deepcopy(plain), lowering="eager")
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0)), plain(batch(0)))
    assert model.compilations.layers_passed_by == ALL


def test_a_dropped_model_and_its_twin_are_freed() -> None:
    model = fxshard.compile(Model(), lowering="eager")
    model(batch(0)).backward()
    held = weakref.ref(model._inner), weakref.ref(model._backend.twins.model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert [each() for each in held] == [None, None]
    assert not stand_ins._RESULTS
