"""Whole weights inside ``model.unshard()``, against the plain model; units within units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxshard
from fxshard._torch.errors import ConfigError, StateError
from tests.pool import Pool
from tests.stack import Stack, batch
from tests.thorough import thorough
from tests.training import llama, my_data_for

CHOICE = fxshard.AdamW(lr=1e-2)


def stack(**options: Any) -> fxshard.ShardedModule:
    return fxshard.compile(Stack(), lowering="eager", optimizer=CHOICE, **options)


def written(zero: int, layout: str) -> list[str]:
    """Write inside, train on: as the plain model that was written to."""
    model, plain = stack(zero=zero, layout=layout), Stack()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    wrong: list[str] = []
    for step in range(3):
        with model.unshard(*([] if step == 0 else ["layers.1"] if step == 1 else [model.head])) as whole:
            for name, parameter in plain.named_parameters():
                here = model.get_parameter(name)
                if name in whole:
                    if not torch.allclose(here, parameter, atol=1e-6) or here is not whole[name]:
                        wrong.append(f"step {step}: {name} is not whole")
                    with torch.no_grad():
                        here.mul_(1 + step).add_(0.1)
                        parameter.mul_(1 + step).add_(0.1)
                elif dist.get_world_size() > 1 and zero and not isinstance(here, dist.tensor.DTensor):
                    wrong.append(f"step {step}: {name} is not asked for, and whole")
        world = dist.get_world_size()
        losses = [plain(*batch(step, rank)) for rank in range(world)]
        torch.stack(losses).mean().backward()
        loss = model(*batch(step, dist.get_rank()))
        loss.backward()
        for each in (optimizer, model.optimizer):
            each.step()
            each.zero_grad()
    found = model.full_state_dict()
    return wrong + [n for n, value in plain.state_dict().items() if not torch.allclose(found[n], value, atol=1e-6)]


@pytest.mark.parametrize(
    ("zero", "layout"), [thorough(0, "auto"), thorough(2, "rows"), thorough(3, "rows"), (3, "whole")]
)
def test_what_is_written_goes_back_to_the_shards(ranks: Pool, zero: int, layout: str) -> None:
    assert ranks(2, written, zero, layout) == [[], []]


def looked_at() -> list[str]:
    """Parts run on whole weights, state dicts are whole, and nothing of it changes the shards."""
    model, plain = stack(), Stack()
    x, y = batch(0, dist.get_rank())
    before, wrong = model.full_state_dict(), []
    with model.unshard(writeback=False), torch.no_grad():
        hidden = x
        for layer in model.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        if not torch.equal(torch.nn.functional.mse_loss(model.head(hidden), y), plain(x, y)):
            wrong.append("parts compute something else")
        kept = model.state_dict()
        wrong += [f"state dict {n}" for n, value in plain.state_dict().items() if not torch.equal(kept[n], value)]
    model.unshard("layers.0")
    if type(model.layers[0].weight) is not torch.nn.Parameter or type(model.head.weight) is torch.nn.Parameter:
        wrong.append("the parameter is not whole")
    with torch.no_grad():
        model.layers[0].weight.data = torch.ones(7, 7)
    model.reshard()
    after = model.full_state_dict()
    wrong += [n for n in before if not torch.equal(after[n], torch.ones(7, 7) if n == "layers.0.weight" else before[n])]
    return wrong


def test_parts_run_and_state_dicts_are_whole(ranks: Pool) -> None:
    assert ranks(2, looked_at) == [[], []]


def refused() -> list[str]:
    """What each misuse is told; afterwards the model is as it was."""
    model = stack()
    data = batch(0, dist.get_rank())
    before, loss = model.full_state_dict(), model(*data).detach()
    told: list[str] = []

    def misuse(message: str, act: Any, *parts: str, writeback: bool = True) -> None:
        with pytest.raises(StateError, match=message), model.unshard(*parts, writeback=writeback):
            act()

    def overwrite() -> None:
        with torch.no_grad():
            model.layers[1].bias.zero_()

    misuse(r"layers.1.bias was written inside model.unshard\(writeback=False\)", overwrite, writeback=False)
    misuse("the model was called inside", lambda: model(*data))
    misuse("unsharded already", model.unshard)
    misuse("gradient of the whole head.weight", lambda: model.head(data[0]).sum().backward(), "head")
    misuse("also uses layers.0.weight", lambda: model.layers[0](data[0]), "head")
    with pytest.raises(StateError, match="is not unsharded"):
        model.reshard()
    with pytest.raises(ConfigError, match="no part of this sharded model"):
        model.unshard(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="nope"):
        model.unshard("nope")
    with pytest.raises(ZeroDivisionError), model.unshard():
        overwrite()
        raise ZeroDivisionError
    model(*data).backward()
    misuse(r"optimizer.step\(\) was called inside", model.optimizer.step)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(StateError, match=r"the shards of head\.weight changed inside"), model.unshard("head"):
        overwrite()  # on the shards of what is not unsharded: fine
        other.step()
    model.optimizer.zero_grad()
    model.load_state_dict(before)
    after = model.full_state_dict()
    told += [name for name in before if not torch.equal(after[name], before[name])]
    return told + ([] if torch.equal(model(*data).detach(), loss) else ["loss"])


def test_misuse_is_refused(ranks: Pool) -> None:
    assert ranks(2, refused) == [[], []]


def nested(zero: int) -> list[str]:
    """Units within units: the innermost has a parameter, and training is that of the plain model."""
    units = ["layers.*", "layers.*.mlp", "layers.0.attention.q"]
    model = fxshard.compile(llama(layers=1), zero=zero, lowering="eager", units=units, optimizer=CHOICE)
    plain = llama(layers=1)
    plain.load_state_dict(model.full_state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    world = dist.get_world_size()
    for step in range(2):
        model(*my_data_for(model, step)).backward()
        data = [None] * world
        dist.all_gather_object(data, my_data_for(model, step))
        torch.stack([plain(*each) for each in data if each is not None]).mean().backward()
        for each in (optimizer, model.optimizer):
            each.step()
            each.zero_grad()
    found = model.full_state_dict()
    wrong = [n for n, value in plain.state_dict().items() if not torch.allclose(found[n], value, atol=1e-4)]
    held = {bucket.plan.unit: set(bucket.plan.params) for bucket in model._sharding.buckets}
    expected = {f"layers.0.mlp.{w}.weight" for w in ("w1", "w2", "w3")}
    if held.get("layers.0.mlp") != expected or held.get("layers.0.attention.q") != {"layers.0.attention.q.weight"}:
        wrong.append(str(held))
    return wrong


@pytest.mark.parametrize("zero", [thorough(1), 3])
def test_units_within_units(ranks: Pool, zero: int) -> None:
    assert ranks(2, nested, zero) == [[], []]
