"""``nan=`` of AdamW and Muon: a step whose gradients are not finite changes no bit; by default nothing is checked."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import fxshard
from tests.optim.late import known_late
from tests.pool import Pool
from tests.stack import Stack
from tests.training import deliver, random_gradients

LR, POISONED = 1e-2, 1


def plain_steps(name: str, seeds: list[int]) -> dict[str, torch.Tensor]:
    """Parameters after steps over the gradients of these seeds, in one process: torch's AdamW, or Muon unsharded."""
    plain = Stack()
    muon = fxshard.Muon(lr=LR).build(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, fused=True) if name == "AdamW" else muon
    for seed in seeds:
        for name, grad in random_gradients(Stack(), seed).items():
            plain.get_parameter(name).grad = grad
        optimizer.step()
    return plain.state_dict()


def held(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    """This rank's rows of all parameters, and all optimizer state, copied without asking the optimizer."""
    state = [value for of_one in model.optimizer.state.values() for value in of_one.values()]
    tensors = [*model.parameters(), *state]
    local = [tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor for tensor in tensors]
    return [tensor.detach().clone() for tensor in local]


def poison(model: fxshard.ShardedModule, value: float) -> None:
    """One element of one rank."""
    if dist.get_rank() == POISONED:
        rows = [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]
        next(each for each in rows if each.numel()).view(-1)[-1] = value


def poisoned(name: str, nan: str, late: bool, value: float) -> dict[str, Any]:
    choice = getattr(fxshard, name)(lr=LR, nan=nan)
    model = fxshard.shard(Stack(), optimizer=choice, zero=2, layout="rows")  # in which Muon's matrices travel
    said: list[str] = []

    def step() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model.optimizer.step()
            except fxshard.StateError as error:
                said.append(str(error))
        said.extend(str(warning.message) for warning in caught)

    with known_late() if late else contextlib.nullcontext():
        deliver(model, random_gradients(Stack(), 0))
        step()
        before = held(model)
        deliver(model, random_gradients(Stack(), 1))
        poison(model, value)
        step()
        unchanged = all(torch.equal(a, b) for a, b in zip(held(model), before, strict=True))
        deliver(model, random_gradients(Stack(), 2))
        step()
        if late and nan == "raise":  # it was said when this step began, and nothing was changed: again
            unchanged = unchanged and all(torch.equal(a, b) for a, b in zip(held(model), before, strict=True))
            step()
        skipped = model.optimizer.skipped_steps
    return {"said": said, "unchanged": unchanged, "after": model.full_state_dict(), "skipped": skipped}


@pytest.mark.shows("X6")
@pytest.mark.parametrize(("name", "late"), [("AdamW", False), ("AdamW", True), ("Muon", False), ("Muon", True)])
@pytest.mark.parametrize(("nan", "value"), [("raise", math.nan), ("skip", -math.inf)])
def test_what_is_not_finite_changes_nothing_on_any_rank(
    ranks: Pool, name: str, nan: str, value: float, late: bool
) -> None:
    expected = plain_steps(name, [0, 2])
    for found in ranks(2, poisoned, name, nan, late, value):
        assert len(found["said"]) == 1 and "not finite" in found["said"][0], found["said"]
        assert (f"fxshard.{name}(nan=" in found["said"][0]) == (nan == "raise")
        assert found["unchanged"] and found["skipped"] == 1
        assert all(torch.equal(found["after"][name], expected[name]) for name in expected)


def test_without_it_nobody_looks() -> None:
    """No norm, no number read, and what is not finite gets into the parameters, as in torch."""
    model = fxshard.shard(Stack(), optimizer=fxshard.AdamW(lr=LR))
    grads = random_gradients(Stack(), 0)
    deliver(model, copy.deepcopy(grads))
    model.optimizer.step()
    grads["head.bias"].fill_(math.nan)
    deliver(model, grads)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model.optimizer.step()
    called = {event.key for event in found.events() or () if getattr(event.cpu_parent, "key", "")[:6] != "aten::"}
    assert not called & {f"aten::{name}" for name in ("isfinite", "_foreach_norm", "all", "item", "is_nonzero")}
    assert bool(dict(model.named_parameters())["head.bias"].isnan().all())
    assert model.optimizer.skipped_steps == 0


def test_choices_are_checked() -> None:
    with pytest.raises(fxshard.ConfigError, match="nan='ignore'"):
        fxshard.AdamW(nan="ignore")
    with pytest.raises(fxshard.ConfigError, match="say it to Muon alone"):
        fxshard.Muon(nan="raise", adamw=fxshard.AdamW(nan="skip"))
