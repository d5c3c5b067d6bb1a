"""``weight0 … weightN`` of grouped linears and one stacked ``weight``: each loads what the other saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.planner.stored_names import Source, find_sources
from tests.checkpoint.zoo import deliver, same
from tests.pool import Pool

EXPERTS, OUT, IN = 12, 16, 5
"""More than ten experts: numbers are no letters. Biases fill vectors: AdamW rounds them alike, stacked or apart."""


class Indexed(nn.Module):
    """As Transformer Engine's ``GroupedLinear`` names its parameters."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(EXPERTS):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.randn(OUT, IN)))
            self.register_parameter(f"bias{i}", nn.Parameter(torch.randn(OUT)))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, OUT, IN))
        self.bias = nn.Parameter(torch.randn(EXPERTS, OUT))


class Layers(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"fc1": kind()}) for _ in range(2))
        self.out = nn.Linear(3, 3)


class Wrapped(nn.Module):
    """What a wrapper leaves: ``module.`` in front of every name."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.module = Layers(kind)


CHOICE = fxshard.Muon(
    use=lambda name, shape: "weight" in name and "fc1" in name,
    adamw=fxshard.AdamW(lr=1e-2, decay=lambda name, shape: "bias" not in name),
)


def stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of ``Layers(Indexed)``, wrapped or not, as one of ``Layers(Stacked)``."""
    state = {name.removeprefix("module."): value for name, value in state.items()}
    found = {name: value for name, value in state.items() if "fc1" not in name}
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = [state[f"layers.{layer}.fc1.{kind}{i}"] for i in range(EXPERTS)]
            found[f"layers.{layer}.fc1.{kind}"] = torch.stack(parts)
    return found


def in_common(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Any of the four models' state dicts as one of ``Layers(Stacked)``."""
    indexed = any("weight11" in name for name in state)
    return stacked(state) if indexed else {name.removeprefix("module."): value for name, value in state.items()}


def make(kind: type[nn.Module], wrapped: bool) -> nn.Module:
    return Wrapped(kind) if wrapped else Layers(kind)


def step(model: Any, optimizer: Any, seed: int, give: Any) -> dict[str, torch.Tensor]:
    """A step with the same gradients, whatever the names."""
    generator = torch.Generator().manual_seed(seed)
    common = {name: torch.randn(p.shape, generator=generator) for name, p in Layers(Indexed).named_parameters()}
    names = [name for name, _ in model.named_parameters()]
    grads = common if any("weight11" in name for name in names) else stacked(common)
    give({("module." if names[0].startswith("module.") else "") + name: grad for name, grad in grads.items()})
    optimizer.step()
    return in_common(model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict())


def sharded_step(model: fxshard.ShardedModule, seed: int) -> dict[str, torch.Tensor]:
    return step(model, model.optimizer, seed, lambda grads: deliver(model, grads))


CASES = [(Indexed, Stacked, False, False), (Stacked, Indexed, True, False), (Indexed, Stacked, False, True)]
"""What is saved and what loads it, and whether each of them is wrapped."""


def through_files(path: Path) -> list[str]:
    wrong = []
    for one, other, here, there in CASES:
        torch.manual_seed(dist.get_rank())
        first = fxshard.shard(make(one, here), optimizer=CHOICE, zero=3, layout="rows")
        sharded_step(first, 1)
        where = path / f"{one.__name__}-{here}-{there}"
        fxshard.save(first, where)
        second = fxshard.shard(make(other, there), optimizer=CHOICE, zero=2)
        fxshard.load(second, where)
        wrong += same(sharded_step(second, 2), sharded_step(first, 2))
    return wrong


@pytest.mark.shows("X2")
def test_save_and_load(ranks: Pool, tmp_path: Path) -> None:
    """Momentum, moments and step counts move too: the steps after are the same bit by bit."""
    assert ranks(2, through_files, tmp_path) == [[]] * 2


def through_state_dicts() -> list[str]:
    """From a plain model and its optimizer into a sharded one of the other layout."""
    wrong = []
    for one, other, here, there in CASES:
        torch.manual_seed(0)
        plain = make(one, here)
        optimizer = CHOICE.build(plain)

        def give(grads: dict[str, torch.Tensor], plain: nn.Module = plain) -> None:
            for name, grad in grads.items():
                plain.get_parameter(name).grad = grad

        step(plain, optimizer, 1, give)
        model = fxshard.shard(make(other, there), optimizer=CHOICE, zero=3)
        model.load_state_dict(copy.deepcopy(plain.state_dict()))
        model.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        wrong += same(sharded_step(model, 2), step(plain, optimizer, 2, give))
    return wrong


@pytest.mark.shows("X2")
def test_load_state_dict_of_model_and_optimizer(ranks: Pool) -> None:
    assert ranks(2, through_state_dicts) == [[]] * 2


def test_state_dicts_that_do_not_fit_change_nothing() -> None:
    model = fxshard.shard(Layers(Stacked), optimizer=CHOICE)
    before = model.full_state_dict()
    given = Layers(Indexed).state_dict()
    del given["layers.1.fc1.weight7"]
    with pytest.raises(fxshard.ConfigError, match=r"missing keys: \['layers.1.fc1.weight'\]"):
        model.load_state_dict(given)
    assert same(model.full_state_dict(), before) == []
    optimizer = CHOICE.build(plain := Layers(Indexed))
    for name, parameter in plain.named_parameters():
        parameter.grad = None if name == "layers.0.fc1.bias3" else torch.randn_like(parameter)
    optimizer.step()
    with pytest.raises(fxshard.StateError, match=r"layers\.0\.fc1\.bias"):
        model.optimizer.load_state_dict(optimizer.state_dict())


def test_names() -> None:
    stored = {f"a.fc1.{kind}{i}": shape for kind, shape in (("weight", (3, 5)), ("bias", (3,))) for i in range(12)}
    found = find_sources({("a.fc1.weight",): (12, 3, 5), ("a.fc1.bias",): (12, 3)}, stored)
    assert found.problems == found.unused == []
    assert found.of["a.fc1.weight"] == Source(tuple(f"a.fc1.weight{i}" for i in range(12)), stacked=True)
    assert found.of["a.fc1.bias"].names[11] == "a.fc1.bias11"
    wrapped = find_sources({("a.w",): (2,), ("b.w",): (3,)}, {"module.module.a.w": (2,), "module.module.b.w": (3,)})
    assert wrapped.of == {"a.w": Source(("module.module.a.w",)), "b.w": Source(("module.module.b.w",))}
    partly = find_sources({("a.w",): (2,)}, {"module.a.w": (2,), "b.w": (3,)})
    assert partly.problems == ["a.w is missing"]
