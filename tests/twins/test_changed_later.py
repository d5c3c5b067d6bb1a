"""What is changed in a model whose layers were passed by."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import fxshard
from fxshard.repetition import stand_ins
from fxshard.repetition.twins import Twins
from tests.twins.models import ALL, WIDTH, Layer, Model, Normed, batch, passed_by


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
