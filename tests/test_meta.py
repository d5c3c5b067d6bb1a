"""Models on the meta device, frozen parts, adapters, tied weights and buffers."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxshard
from fxshard.frontend import materialise
from tests.measuring import NewBytes
from tests.pool import Pool
from tests.toy import Mlp
from tests.training import EPS, full_gradients, step_both


class Net(nn.Module):
    """A tied embedding, a batch norm, blocks, a scale of its own and a table that is a buffer."""

    def __init__(self, dim: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(24, dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim)) for _ in range(layers))
        self.norm = nn.BatchNorm1d(dim)
        self.head = nn.Linear(dim, 24)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.empty(dim))
        self.register_buffer("table", torch.empty(dim))
        self.register_buffer("positions", torch.empty(4, dtype=torch.int64))
        self.scale.tag = "kept"  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        with torch.no_grad():
            self.table.copy_(torch.linspace(0, 1, len(self.table)))
            self.positions.copy_(torch.arange(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(x) * self.scale + self.table
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return F.cross_entropy(self.head(self.norm(hidden)), x)


def on_meta(make: type[nn.Module] = Net, *args: int) -> nn.Module:
    with torch.device("meta"):
        return make(*args)


def reset_all(model: nn.Module) -> nn.Module:
    """What a person writes without fxshard; the head is skipped because its weight is the embedding's."""
    model.to_empty(device="cpu")
    model.head.weight = model.emb.weight
    for name, module in model.named_modules():
        if hasattr(module, "reset_parameters") and name != "head":
            module.reset_parameters()
        if name == "head":
            kept = model.emb.weight.detach().clone()
            module.reset_parameters()
            with torch.no_grad():
                model.emb.weight.copy_(kept)
    return model


def from_meta() -> dict[str, bool]:
    torch.manual_seed(100 * dist.get_rank())  # only rank 0's values count
    model = fxshard.compile(on_meta(), optimizer=fxshard.AdamW(lr=1e-2, eps=EPS), lowering="eager")
    torch.manual_seed(0)
    plain = reset_all(on_meta())
    state = model.full_state_dict()
    found = {name: torch.equal(value, state[name]) for name, value in plain.state_dict().items()}
    x = torch.arange(24)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS, fused=True)
    for step in range(2):
        loss, expected = step_both(model, plain, optimizer, x)
        found[f"loss {step}"] = torch.allclose(loss, expected, rtol=1e-5)
    after = plain.state_dict()
    found["statistics"] = torch.allclose(model.norm.running_var, after["norm.running_var"], rtol=1e-5)
    found["batches"] = int(model.state_dict()["norm.num_batches_tracked"]) == 2
    found["attribute"] = model.scale.tag == "kept"
    return found


@pytest.mark.shows("S13", "L5")
def test_a_meta_model_is_made_as_a_person_would_make_it(ranks: Pool) -> None:
    for found in ranks(2, from_meta):
        assert all(found.values()), found


def peak() -> tuple[int, int, int]:
    """Bytes of one block, of this rank's shards, and the most that was alive while a module was initialised."""
    dim, layers = 64, 8
    new, most = NewBytes(), 0
    model = on_meta(Net, dim, layers)
    unit = sum(p.numel() * 4 for p in model.layers[0].parameters())

    def init(module: nn.Module) -> None:
        nonlocal most
        module.reset_parameters()  # type: ignore[operator]
        if isinstance(module, nn.Linear):  # the largest; counting takes a while
            # Twice: a thread of gloo may hold what it has sent for a moment longer.
            most = max(most, min(new.count(), new.count()))

    sharded = fxshard.compile(model, init=init, lowering="eager")
    gc.collect()
    return unit, sum(bucket.master.nbytes for bucket in sharded._sharding.buckets), most


@pytest.mark.shows("S13")
def test_the_peak_is_one_unit_beside_the_shard(ranks: Pool) -> None:
    for unit, shard, most in ranks(2, peak):
        assert shard > 3 * unit
        assert most < shard + 1.5 * unit


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(2, 2)
        self.bare = nn.Module()
        self.bare.weight = nn.Parameter(torch.empty(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.good(x)


def test_modules_nobody_can_initialise_are_named_first() -> None:
    model = on_meta(Bare)
    with pytest.raises(fxshard.ConfigError, match=r"bare \(Module: weight\).*init="):
        fxshard.compile(model)
    assert all(parameter.is_meta for parameter in model.parameters())  # nothing was allocated

    def partly(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    with pytest.raises(fxshard.ConfigError, match=r"bare\.weight was not initialised"):
        fxshard.compile(on_meta(Bare), init=partly)


class Lora(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = Mlp(7, 16, 16, 5)
    model.net = nn.Sequential(*(Lora(layer) if isinstance(layer, nn.Linear) else layer for layer in model.net))
    return model


def lora(zero: int) -> tuple[bool, bool, list[str]]:
    model = fxshard.compile(adapted(), zero=zero, optimizer=fxshard.AdamW(lr=1e-2, eps=EPS), lowering="eager")
    plain = adapted()
    x, y = torch.randn(6, 7), torch.randn(6, 5)
    before = {name: value.clone() for name, value in model.full_state_dict().items()}
    loss = model(x, y)
    loss.backward()
    plain(x, y).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = full_gradients(model)
    same = found.keys() == expected.keys() and all(
        torch.allclose(found[name], value, rtol=1e-5, atol=1e-7) for name, value in expected.items()
    )
    model.optimizer.step()
    frozen = all(torch.equal(value, before[name]) for name, value in model.full_state_dict().items() if "base" in name)
    held = [
        bucket.plan.name for bucket in model._sharding.buckets if bucket.grad is not None and not bucket.plan.trainable
    ]
    return same, frozen, held


@pytest.mark.parametrize("zero", [3])
def test_adapters_train_beside_a_frozen_base(ranks: Pool, zero: int) -> None:
    for same, frozen, held in ranks(2, lora, zero):
        assert same and frozen
        assert not held  # no gradients for what is frozen


def test_a_stand_in_takes_the_place_of_what_left_already() -> None:
    """A tied weight is initialised once, by its first owner, and its second owner still gets its bias."""
    model = on_meta()
    taken: dict[str, torch.Tensor] = {}

    def take(name: str, parameter: nn.Parameter) -> None:
        assert name not in taken
        taken[name] = parameter.detach().clone()

    made = materialise.materialise(model, torch.device("cpu"), None, take)
    assert "head.bias" in taken and "head.weight" not in taken
    assert model.head.weight is model.emb.weight is made["emb.weight"]
    assert int(model.positions[3]) == 3
