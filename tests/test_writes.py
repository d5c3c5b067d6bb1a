"""What is written to a sharded model reaches the model, or is refused: nothing is accepted and then without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fxshard
from tests.pool import Pool


class Block(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.0), nn.LayerNorm(8)
        self.gain = 0.5
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.drop(torch.relu(self.lin(x))) * self.gain) + self.shift

    def method(self) -> float:
        return float(self.lin.weight.sum())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.temperature, self.extra, self.schedule = 1.0, None, 1.0
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.seq, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)
        self.named, self.scales = nn.ModuleDict({"k": nn.Linear(8, 8)}), nn.ParameterList([torch.ones(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.named["k"](self.seq(x)) * self.scales[0]
        x = x if self.extra is None else x + self.extra
        return self.head(x) / self.temperature * getattr(self, "later", 1.0)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.01)


def without_dropout(model: Any) -> None:
    found = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert len(found) == 2
    for module in found:
        module.p = 1.0


def with_hooks(model: Any) -> None:
    model.layers[0].register_forward_hook(lambda module, args, out: out * 5)
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 3,))


def hook_that_is_removed(model: Any) -> None:
    model(X)
    handle = model.layers[0].register_forward_hook(lambda module, args, out: out * 5)
    model(X)
    handle.remove()
    with model.head.register_forward_hook(lambda module, args, out: out * 2):
        model(X)


REACH: dict[str, Callable[[Any], Any]] = {
    "data of the model": lambda m: setattr(m, "temperature", 3.0),
    "data of a part": lambda m: setattr(m.layers[1], "gain", 3.0),
    "data that was None": lambda m: setattr(m, "extra", torch.ones(8)),
    "data that was not there": lambda m: setattr(m, "later", 3.0),
    "a rate of dropout": lambda m: setattr(m.layers[0].drop, "p", 1.0),
    "every rate of dropout": without_dropout,
    "training": lambda m: setattr(m.layers[0].drop, "training", False),
    "a buffer in place": lambda m: m.layers[0].shift.fill_(2.0),
    "a buffer's data": lambda m: setattr(m.layers[0].shift, "data", torch.full((8,), 3.0)),
    "a new buffer": lambda m: setattr(m.layers[0], "shift", torch.full((8,), 4.0)),
    "a buffer registered again": lambda m: m.layers[0].register_buffer("shift", torch.full((8,), 5.0)),
    "forward hooks": with_hooks,
    "hooks removed": hook_that_is_removed,
    "a hook of the model": lambda m: m.register_forward_hook(lambda module, args, out: out * 5),
    "apply": lambda m: m.apply(initialise),
    "a weight's data in place": lambda m: m.head.weight.data.fill_(1.0),
    "init": lambda m: nn.init.constant_(m.head.weight, 2.0),
    "load_state_dict of a part": lambda m: m.head.load_state_dict({"weight": X[:2], "bias": torch.ones(2)}),
    "a state dict": lambda m: m.state_dict()["head.weight"].fill_(3.0),
}


WITHOUT_EFFECT = ("training", "hooks removed")


def outcome(model: nn.Module, write: Callable[[Any], Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model(X)
    write(model)
    out = model(X)
    out.sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("first", range(0, len(REACH), 5))
def test_writes_reach_the_model(first: int) -> None:
    """Several in one model, one after the other: torch compiles a forward again eight times at most."""
    plain, model = Net(), fxshard.compile(Net(), lowering="eager")
    for name in list(REACH)[first : first + 5]:
        before = plain(X).detach()
        expected, gradients = outcome(plain, REACH[name])
        found, ours = outcome(model, REACH[name])
        torch.testing.assert_close(found, expected, msg=name)
        torch.testing.assert_close(ours, gradients, msg=name)
        assert name in WITHOUT_EFFECT or not torch.equal(expected, before), f"{name}: would not be seen"


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parameter": (lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(2, 8))), "'weight' cannot be replaced"),
    "no parameter": (lambda m: setattr(m.head, "bias", None), "'bias' cannot be replaced"),
    "deleted": (lambda m: delattr(m.head, "bias"), "'bias' cannot be replaced"),
    "registered": (lambda m: m.head.register_parameter("bias", None), "'bias' cannot be replaced"),
    "a new one": (lambda m: setattr(m.head, "more", nn.Parameter(torch.ones(1))), "'more' cannot be replaced, added"),
    "of a list": (lambda m: m.scales.append(torch.ones(8)), "what a ParameterList holds cannot be replaced"),
    "module": (lambda m: setattr(m, "head", nn.Linear(8, 2)), "'head' cannot be replaced"),
    "module of a part": (lambda m: setattr(m.layers[0], "lin", nn.Linear(8, 8)), "'lin' cannot be replaced"),
    "add_module": (lambda m: m.add_module("head", nn.Linear(8, 2)), "'head' cannot be replaced"),
    "_modules": (lambda m: m.layers[0]._modules.update(lin=None), "cannot be replaced"),
    "append": (lambda m: m.layers.append(Block()), "what a ModuleList holds cannot be replaced"),
    "pop": (lambda m: m.layers.pop(0), "what a ModuleList holds cannot be replaced"),
    "item": (lambda m: m.named.__setitem__("k", nn.Identity()), "what a ModuleDict holds cannot be replaced"),
    "forward": (lambda m: setattr(m.layers[0], "forward", lambda x: x), "forward of Block cannot be replaced"),
    "class": (lambda m: setattr(m.layers[0], "__class__", nn.Identity), "__class__ of Block cannot be replaced"),
    "cast": (lambda m: m.layers[0].half(), "cannot be moved or cast"),
    "prune": (lambda m: prune.l1_unstructured(m.head, "weight", amount=3), "cannot be replaced"),
    "weight_norm": (lambda m: parametrizations.weight_norm(m.head), "cannot be replaced"),
    "backward hook": (lambda m: m.head.register_full_backward_hook(print), "backward hooks of a part"),
    "our name": (lambda m: setattr(m, "schedule", 2.0), "'schedule' of Net cannot be set any more"),
    "method": (lambda m: m.layers[0].method(), r"method\(\) of Block"),
}


def test_what_cannot_reach_the_model_is_refused() -> None:
    model = fxshard.compile(Net(), lowering="eager")
    before = model(X)
    for write, message in REFUSED.values():
        with pytest.raises(fxshard.StateError, match=message):
            write(model)
    assert torch.equal(model(X), before)


def test_a_parameter_with_other_memory_is_refused() -> None:
    model = fxshard.compile(Net(), lowering="eager")
    model.head.weight.data = torch.ones(2, 8)
    with pytest.raises(fxshard.StateError, match=r"'head\.weight' was given other memory"):
        model(X)


def test_the_tree_is_the_models() -> None:
    plain, model = Net(), fxshard.compile(Net(), lowering="eager")
    for (name, module), (ours, image) in zip(plain.named_modules(), model.named_modules(), strict=True):
        assert name == ours and (not name or isinstance(image, type(module)))
        assert not name or (type(image).__name__, str(image)) == (type(module).__name__, str(module))
    assert len(model.layers) == 2 and len(model.layers[1:]) == 1 and model.layers[-1] is model.layers[1]
    assert [type(layer).__name__ for layer in model.seq] == ["Linear", "ReLU"]
    assert list(model.named) == ["k"] and "k" in model.named and model.named["k"].in_features == 8
    assert len(model.scales) == 1 and model.scales[0] is dict(model.named_parameters())["scales.0"]
    assert model.layers[0].gain == 0.5, "what an instance has comes before what its class has"


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def test_a_sequential_is_one() -> None:
    model = fxshard.compile(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)), lowering="eager")
    assert len(model) == 3 and model[-1].weight is model.get_parameter("2.weight")
    assert [type(layer).__name__ for layer in model] == ["Linear", "Tanh", "Linear"]
    assert list(model[:2]) == list(model.children())[:2]


def test_train_is_the_modules_own() -> None:
    model = fxshard.compile(nn.Sequential(nn.Linear(8, 8), Frozen(8)), lowering="eager")
    assert [module.training for module in model.train().modules()] == [True, True, False]
    assert not any(module.training for module in model.eval().modules())


def on_two_ranks() -> bool:
    def write(model: Any) -> None:
        with_hooks(model)
        REACH["apply"](model)

    expected, gradients = outcome(Net(), write)
    found, ours = outcome(fxshard.compile(Net(), lowering="eager"), write)
    full = {name: gradient.to_local() for name, gradient in ours.items()}
    rows = all(
        torch.isfinite(part).all() and part.shape[1:] == gradients[name].shape[1:] for name, part in full.items()
    )
    return torch.allclose(found, expected, atol=1e-6) and rows and full.keys() == gradients.keys()


@pytest.mark.thorough
def test_writes_reach_the_model_on_ranks(ranks: Pool) -> None:
    assert ranks(2, on_two_ranks, timeout=60) == [True] * 2
