"""Hooks of state dicts, and what is said of keys that do not fit: next to a plain ``nn.Module``."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from tests.pool import Pool

Log = list[tuple[Any, ...]]


class Block(nn.Module):
    """Files have what is above and below zero of its weight apart, twice as large."""

    _version = 3

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.log = log
        self.register_state_dict_pre_hook(lambda module, prefix, keep: log.append(("saving", prefix, keep)))
        self.register_state_dict_post_hook(Block.split)
        self.register_load_state_dict_pre_hook(Block.join)
        self._register_load_state_dict_pre_hook(self.count)
        self.register_load_state_dict_post_hook(Block.forgive)

    def split(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        weight = state.pop(prefix + "weight") * 2
        self.log.append(("split", prefix, metadata, weight.requires_grad, tuple(self.weight.shape)))
        state[prefix + "above"], state[prefix + "below"] = weight.clamp(min=0), weight.clamp(max=0)

    def join(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        self.log.append(("join", prefix, dict(metadata), sorted(state), rest[0], tuple(self.weight.shape)))
        if prefix + "above" in state:
            state[prefix + "weight"] = (state.pop(prefix + "above") + state.pop(prefix + "below")) / 2

    def count(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.log.append(("count", prefix, len(state)))

    def forgive(self, keys: Any) -> None:
        """The weights are loaded by now."""
        self.log.append(("loaded", list(keys.missing_keys), list(keys.unexpected_keys), whole(self.weight).sum()))
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith("seen")]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


class Model(nn.Module):
    def __init__(self, log: Log) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks, self.last = nn.Linear(4, 4), nn.ModuleList([Block(log)]), nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self._register_state_dict_hook(Model.replaced)
        self.register_load_state_dict_post_hook(lambda module, keys: keys.unexpected_keys.append("said by the model"))

    def replaced(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> dict[str, Any]:
        return {"wrapped": 1, **state}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks[0](self.first(x))).square().mean() * self.scale


def said(load: Callable[..., Any], state: Mapping[str, Any], log: Log, **options: Any) -> tuple[Any, ...]:
    """What loading returns, or the keys that its error names, and what hooks saw."""
    log.clear()
    try:
        keys = load(state, **options)
        found: Any = (list(keys.missing_keys), list(keys.unexpected_keys))
    except (RuntimeError, fxshard.ConfigError) as error:
        found = sorted({*re.findall(r"(?:first|blocks|last)\.[\w.]*\w", str(error))})
    return found, copy.deepcopy(log)


def differences(**options: Any) -> list[str]:
    """Where a sharded model does not do what the plain one does."""
    plain_log: Log = []
    log: Log = []
    plain = Model(plain_log)
    model = fxshard.compile(Model(log), lowering="eager", **options)
    own = plain.state_dict()
    found = []
    for name, take in (("sharded", model.state_dict), ("full", model.full_state_dict)):
        plain_log.clear()
        log.clear()
        state, expected = take(), plain.state_dict()
        if [*state] != [*expected] or log != plain_log:
            found.append(f"{name}: {[*state]} {log} {plain_log}")
        found += [f"{name} {key}" for key in own if key != "wrapped" and not torch.equal(whole(state[key]), own[key])]
    double = {key: value * 2 if isinstance(value, torch.Tensor) else value for key, value in own.items()}
    del double["wrapped"]
    versioned = OrderedDict(double)
    versioned._metadata = {"blocks.0": {"version": 2}}  # type: ignore[attr-defined]
    cases: dict[str, tuple[Mapping[str, Any], dict[str, Any]]] = {
        "all": (double, {"strict": False}),
        "of an earlier version": (versioned, {"strict": False}),
        "numbers with a dimension": ({**double, "scale": torch.ones(1)}, {"strict": False}),
        "forgiven": ({k: v for k, v in double.items() if not k.endswith("seen")}, {"strict": False}),
        "too few": ({k: v for k, v in double.items() if "first" not in k}, {"strict": False}),
        "too many": ({"x.y": double["scale"], **double, "first.z": torch.ones(1)}, {"strict": False}),
        "strict": ({k: v for k, v in double.items() if "last" not in k} | {"last.z": torch.ones(1)}, {}),
        "shapes": ({**double, "first.bias": torch.ones(5), "last.bias": torch.ones(2)}, {"strict": False}),
        "buffers that are not kept": ({**double, "blocks.0.scratch": torch.ones(2)}, {"strict": False}),
    }
    for name, (state, how) in cases.items():
        ours = said(model.load_state_dict, state, log, **how)
        theirs = said(plain.load_state_dict, state, plain_log, **how)
        loaded = dict(model.named_parameters())
        if name == "shapes":  # nothing is loaded, and no hook runs after that
            ours, theirs = (ours[0], ours[1][:2]), (theirs[0], theirs[1][:2])
        elif any(not torch.equal(value, whole(loaded[key])) for key, value in plain.named_parameters()):
            found.append(f"{name}: other values")
        if repr(ours) != repr(theirs):
            found.append(f"{name}: {ours} and not {theirs}")
    return found


def on_ranks() -> list[str]:
    return [f"{zero}: {each}" for zero in (1, 3) for each in differences(zero=zero, layout="rows")]


def test_hooks_see_and_change_what_they_do_in_a_plain_model() -> None:
    assert differences() == []


def test_hooks_on_two_ranks(ranks: Pool) -> None:
    assert ranks(2, on_ranks) == [[], []]


class Renames(nn.Module):
    """Files of an earlier version have its weight under another name, newer ones a note and a stamp."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # type: ignore[override]
        if prefix + "w" in state:
            state[prefix + "weight"] = state.pop(prefix + "w")
        state.pop(prefix + "note", None)
        state.pop(prefix + "stamp", None)
        super()._load_from_state_dict(state, prefix, *rest)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "note"] = torch.ones(1)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state[kwargs.get("prefix", "") + "stamp"] = self.weight.detach().new_tensor(self.weight.ndim)
        return state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict({key.removeprefix("net."): value for key, value in state.items()}, strict)


class Renamed(Renames, nn.Linear):
    pass


class Net(Renames, nn.Sequential):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.weight = nn.Parameter(torch.randn(6))


def own_state() -> list[Any]:
    torch.manual_seed(0)
    plain = Net(Renamed(3, 5), nn.BatchNorm1d(5), nn.Sequential(Renamed(5, 2)))
    model = fxshard.shard(copy.deepcopy(plain), layout="rows")
    full, expected = model.full_state_dict(), plain.state_dict()
    torch.testing.assert_close(full, expected)
    given = {key: value + 1 for key, value in expected.items() if "tracked" not in key}  # as torch wrote it before
    for prefix in ("", "0.", "2.0."):
        given[prefix + "w"] = given.pop(prefix + "weight")
    given = {f"net.{key}": value for key, value in given.items()}
    keys = [target.load_state_dict(given) for target in (plain, model)]
    torch.testing.assert_close(model.full_state_dict(), plain.state_dict())
    return [[*model.state_dict()] == [*full] == [*expected], keys[0] == keys[1]]


def test_classes_that_have_state_dicts_of_their_own(ranks: Pool) -> None:
    """Of torch's, batch norms: state dicts of earlier versions do not say how many batches they have seen."""
    assert own_state() == [True, True]
    assert ranks(2, own_state) == [[True, True]] * 2


def test_keys_that_do_not_fit_are_all_named_before_anything_is_loaded() -> None:
    model = fxshard.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    before = model.full_state_dict()
    given = {"0.weight": torch.zeros(4, 4), "1.weight": torch.zeros(4, 3), "2.bias": torch.zeros(4), "0.bias": 3}
    with pytest.raises(fxshard.ConfigError) as error:
        model.load_state_dict(given)
    text = str(error.value)
    assert "missing keys: ['1.bias']" in text and "unexpected keys: ['2.bias']" in text
    assert "1.weight has shape (4, 3)" in text and "0.bias is a int" in text and "nothing was loaded" in text
    torch.testing.assert_close(model.full_state_dict(), before)


def test_what_is_given_for_each_name_of_a_tied_parameter_is_looked_at() -> None:
    """The last one stays, as in a plain module; and a shape that differs is said also where names are wrapped."""
    plain = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    plain[1].weight = plain[0].weight
    model = fxshard.shard(copy.deepcopy(plain))
    for target in (plain, model):
        target.load_state_dict({"0.weight": torch.zeros(3, 3), "1.weight": torch.ones(3, 3)})
    assert torch.equal(model.full_state_dict()["0.weight"], plain.state_dict()["0.weight"])
    for wrapped in ("", "module."):
        given = {f"{wrapped}0.weight": torch.zeros(3, 3), f"{wrapped}1.weight": torch.zeros(2, 3)}
        with pytest.raises(fxshard.ConfigError, match=r"1\.weight has shape \(2, 3\)"):
            model.load_state_dict(given, strict=False)
    model = fxshard.shard(nn.Linear(3, 3))
    with pytest.raises(fxshard.ConfigError, match=r"bias has shape \(2,\)"):
        model.load_state_dict({"module.weight": torch.zeros(3, 3), "module.bias": torch.zeros(2)}, strict=False)


def test_hooks_of_checkpoints_are_not_those_of_state_dicts(tmp_path: Any) -> None:
    """``fxshard.save`` writes parameters as they are, whatever state dicts look like."""
    model = fxshard.shard(Model([]))
    before = {name: whole(value).clone() for name, value in model.named_parameters()}
    fxshard.save(model, tmp_path / "saved")
    other = fxshard.shard(Model([]))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fxshard.load(other, tmp_path / "saved")
    assert all(torch.equal(whole(value), before[name]) for name, value in other.named_parameters())
