"""Sharded Muon is Newton–Schulz of the full gradient followed by slicing, in every layout and stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.planner.state import second_numel
from fxshard.schedule.events import Kind
from tests.pool import Pool
from tests.stack import Stack
from tests.thorough import thorough
from tests.training import (
    deliver,
    llama,
    my_data_for,
    random_gradients,
    step_beside,
    stepped,
    with_debug,
)

ADAMW = fxshard.AdamW(lr=1e-3, eps=1e-4, weight_decay=0.1)
MUON = fxshard.Muon(lr=2e-2, weight_decay=0.1, adamw=ADAMW)


def short() -> nn.Module:
    return llama(layers=2)


def single() -> nn.Module:
    return llama(layers=1)


def against_plain(choice: fxshard.Muon, make: Any = short, steps: int = 2, **options: Any) -> list[str]:
    """Step sharded and, beside it, plain, with the same full gradients; returns what differs in any bit."""
    model = fxshard.shard(make(), optimizer=choice, **with_debug(options))
    plain = make()
    plain.load_state_dict(model.full_state_dict())
    reference = choice.build(plain)
    different: list[str] = []
    for step in range(steps):
        torch.manual_seed(step)
        grads = {
            name: torch.randn_like(p)
            for name, p in plain.named_parameters()
            if p.requires_grad and "unused" not in name
        }
        deliver(model, grads)
        different += step_beside(model, plain, reference, grads, step)
    return different


def stages_and_layouts() -> dict[str, list[str]]:
    found = {}
    for zero, layout in ((0, "auto"), (1, "whole"), (2, "rows"), (3, "whole"), (3, "rows")):
        found[f"ZeRO-{zero} {layout}"] = against_plain(MUON, zero=zero, layout=layout)
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layout in ("whole", "rows"):
            found[f"HSDP {layout}"] = against_plain(MUON, zero=3, layout=layout, mesh=mesh)
        groups = {"*.qkv.weight": init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "ep_dp"))["ep_dp"]}
        for layout in ("whole", "rows"):  # matrices travel among four ranks, and those of the group among two
            found[f"groups {layout}"] = against_plain(SPLIT, fused, zero=3, layout=layout, groups=groups)
    return found


@pytest.mark.shows("O1", "L10")
@pytest.mark.parametrize("world", [thorough(2), 3, thorough(4)])
def test_equals_the_plain_step_on_the_full_gradient_bitwise(ranks: Pool, world: int) -> None:
    for found in ranks(world, stages_and_layouts):
        assert found == {name: [] for name in found}


class Fused(nn.Module):
    """A fused projection, a stack of experts, a bias, a frozen matrix, and a matrix that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_FusedBlock() for _ in range(2))
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.one_hot(x % 24, 24).float()
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean() + 0 * y.sum()


class _FusedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 24 + 2 * 8)
        self.o = nn.Linear(24, 24)
        self.experts = nn.Parameter(torch.randn(5, 24, 24) / 5)
        self.frozen = nn.Parameter(torch.randn(24, 24) / 5, requires_grad=False)
        self.unused = nn.Linear(24, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split([24, 8, 8], -1)
        x = self.o(q * (k.sum(-1, keepdim=True).tanh() + v.mean(-1, keepdim=True)))
        return torch.einsum("bld,edf->blf", x, self.experts).tanh() + x @ self.frozen


def tied() -> nn.Module:
    return llama(tied=True, layers=2)


def fused() -> nn.Module:
    torch.manual_seed(3)
    return Fused()


SPLIT = fxshard.Muon(lr=2e-2, scale="spectral", adamw=ADAMW, split={"*.qkv.weight": (24, 8, 8)})


def splits_experts_and_the_rest() -> dict[str, list[str]]:
    found = {
        f"{zero} {layout}": against_plain(SPLIT, fused, zero=zero, layout=layout)
        for zero, layout in ((0, "auto"), (1, "whole"), (3, "rows"), (3, "auto"))
    }
    found["tied"] = against_plain(MUON, tied, zero=3, layout="rows")
    found["no overlap"] = against_plain(MUON, zero=3, layout="rows", overlap=False)
    bf16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)
    found["mixed"] = against_plain(MUON, zero=3, layout="rows", precision=bf16)
    return found


@pytest.mark.shows("O1", "O9", "O10")
def test_splits_experts_tied_frozen_and_unused_weights(ranks: Pool) -> None:
    for found in ranks(3, splits_experts_and_the_rest):
        assert found == {name: [] for name in found}


# -- what travels ------------------------------------------------------------------------------------------------------


class _Counter:
    """Counts the collectives that torch.distributed starts while it is open."""

    def __enter__(self) -> dict[str, int]:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.__enter__()
        self.found: dict[str, int] = {}
        return self.found

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        for entry in self._profile.key_averages():
            if entry.key.startswith("gloo:"):
                self.found[entry.key.removeprefix("gloo:")] = entry.count


def collectives_of_a_step(optimizer: Any, make: Any = Stack, **options: Any) -> dict[str, int]:
    model = fxshard.compile(make(), optimizer=optimizer, lowering="eager", **options)
    model(*my_data_for(model, 0)).backward()
    dist.barrier()
    with _Counter() as found:
        model.optimizer.step()
        model.optimizer.zero_grad()
        model(*my_data_for(model, 1)).backward()
    return found


def collectives() -> dict[str, dict[str, int]]:
    return {
        "adamw whole": collectives_of_a_step(ADAMW, zero=3, layout="whole"),
        "muon whole": collectives_of_a_step(MUON, zero=3, layout="whole"),
        "muon rows": collectives_of_a_step(MUON, single, zero=3, layout="rows"),  # whose matrices cross ranks
    }


@pytest.mark.shows("O3", "O4")
def test_a_whole_layout_adds_no_collective(ranks: Pool) -> None:
    """But for the flag that says whether every rank's gradients are finite: four bytes."""
    for found in ranks(2, collectives):
        flag = {"all_reduce": 1}
        muon, adamw = found["muon whole"], found["adamw whole"]
        assert {kind: n - adamw.get(kind, 0) for kind, n in muon.items() if n != adamw.get(kind, 0)} == flag, found
        assert found["muon rows"]["all_to_all"] == 2, found  # there and back, one batch


@pytest.mark.shows("O4")
def test_only_matrices_on_several_ranks_travel() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    schedule = fxshard.plan(single(), (tokens, tokens), world_size=3, optimizer=MUON, layout="rows", lowering="eager")
    crossing = {
        name
        for bucket in schedule.buckets
        for name in bucket.matrices
        if len([rank for rank in range(3) if bucket.layout.fragment(rank, name).numel]) > 1
    }
    exchanges = [event for _, event in schedule.of(Kind.EXCHANGE)]
    assert crossing and {name for event in exchanges for name in event.params} == crossing
    assert len(exchanges) == 2  # there and back
    assert "EXCHANGE" in str(schedule).upper()
    assert schedule.simulate("h200").step_seconds > 0


# -- state -------------------------------------------------------------------------------------------------------------


def momentum_bytes() -> tuple[int, int, int]:
    model = fxshard.shard(llama(), optimizer=MUON, zero=3, layout="rows")
    held = [(bucket.plan, fragment) for bucket in model._sharding.buckets for fragment in bucket.fragments]
    first = sum(fragment.numel for _, fragment in held)
    second = sum(second_numel(plan, fragment) for plan, fragment in held)
    return model.bytes_at_rest()["state"], 4 * first, 4 * second


@pytest.mark.shows("O6")
def test_momentum_is_sharded(ranks: Pool) -> None:
    for state, first, second in ranks(2, momentum_bytes):
        assert first + second <= state <= 1.05 * (first + second)
        assert second < first


def resumed() -> bool:
    def fresh() -> fxshard.ShardedModule:
        return fxshard.shard(llama(), optimizer=MUON, zero=3, layout="rows")

    straight = stepped(fresh(), llama, range(4))
    first, second = fresh(), fresh()
    second.load_state_dict(stepped(first, llama, range(2)))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    found = stepped(second, llama, range(2, 4))
    return all(torch.equal(p, found[name]) for name, p in straight.items())


def test_state_dict_resumes_bitwise(ranks: Pool) -> None:
    assert all(ranks(2, resumed))


# -- bad gradients -----------------------------------------------------------------------------------------------------


def missing_on_one_rank() -> bool:
    model = fxshard.shard(llama(), optimizer=MUON, zero=3, layout="rows")
    for step in range(2):
        deliver(model, random_gradients(llama(), step))
        if dist.get_rank() == 0:
            for parameter in model.parameters():
                parameter.grad = None
        model.optimizer.step()
        model.optimizer.zero_grad()
    return bool(torch.stack([p.isfinite().all() for p in model.full_state_dict().values()]).all())


@pytest.mark.shows("O5")
def test_a_missing_gradient_on_one_rank_hangs_nobody(ranks: Pool) -> None:
    assert all(ranks(2, missing_on_one_rank))


def test_parameters_of_others_are_refused() -> None:
    model = fxshard.shard(llama(), optimizer=MUON)
    with pytest.raises(fxshard.ConfigError, match="no others"):
        model.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_loading_an_empty_state_starts_afresh() -> None:
    model = fxshard.shard(llama(), optimizer=MUON)
    deliver(model, random_gradients(llama(), 0))
    model.optimizer.step()
    model.optimizer.load_state_dict({**model.optimizer.state_dict(), "state": {}})
    moments = model.optimizer._moments.values()
    assert not any(m.memory.any() or any(m.counts) for m in moments)
