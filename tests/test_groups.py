"""Expert parameters in groups of their own, and models that communicate themselves: all on four ranks, at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.schedule.events import Kind
from tests.pool import Pool
from tests.training import EPS, full_gradients

DIM, EXPERTS, TOKENS, LAYERS = 8, 4, 16, 1


class Experts(nn.Module):
    """Experts of which this rank holds ``EXPERTS / ranks``; token ``i`` goes to expert ``i % EXPERTS``."""

    def __init__(self, group: str, rank: int, ranks: int) -> None:
        super().__init__()
        weight = torch.randn(EXPERTS, DIM, DIM) / DIM**0.5
        local = EXPERTS // ranks
        self.weight = nn.Parameter(weight[rank * local : (rank + 1) * local].clone())
        self.group, self.ranks = group, ranks
        self.register_buffer("bias", torch.full((local, 1, DIM), 0.1 * (rank + 1 if ranks > 1 else 1)))
        if ranks == 1:
            self.bias[EXPERTS // 2 :] = 0.2

    def exchange(self, x: Tensor) -> Tensor:
        splits = [x.shape[0] // self.ranks] * self.ranks
        return functional.all_to_all_single_autograd(x, splits, splits, self.group) if self.ranks > 1 else x

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, EXPERTS, DIM).transpose(0, 1).contiguous()  # by expert, hence by owner
        there = self.exchange(tokens).view(self.ranks, -1, tokens.shape[1], DIM).transpose(0, 1)
        done = torch.tanh(torch.bmm(there.flatten(1, 2), self.weight) + self.bias)
        back = self.exchange(done.view(-1, self.ranks, tokens.shape[1], DIM).transpose(0, 1).flatten(0, 1).contiguous())
        return back.view(tokens.shape).transpose(0, 1).reshape(x.shape)


class Layer(nn.Module):
    def __init__(self, *where: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = Experts(*where)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x)
        index = torch.arange(x.shape[0]) % EXPERTS
        gate = F.softmax(self.router(x), -1).gather(1, index[:, None])
        return x + gate * self.experts(x)


class Moe(nn.Module):
    """``Moe()`` holds all experts; ``Moe(group, rank, ranks)`` its part of them, with the same values."""

    def __init__(self, group: str = "", rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(group, rank, ranks) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return functional.all_reduce(grad.contiguous(), "sum", ctx.group), None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return functional.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class TensorParallel(nn.Module):
    """Two linear layers, cut by columns and by rows."""

    def __init__(self, group: str = "", rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        up, down = torch.randn(16, DIM) / 3, torch.randn(DIM, 16) / 4
        self.up = nn.Parameter(up.chunk(ranks, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(ranks, 1)[rank].clone())
        self.group = group

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = Copy.apply(x, self.group) if self.group else x
        out = F.linear(torch.tanh(F.linear(x, self.up)), self.down)
        return F.mse_loss(Sum.apply(out, self.group) if self.group else out, y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4 * TOKENS, DIM, generator=generator), torch.randn(4 * TOKENS, DIM, generator=generator)


def steps(model: Any, optimizer: torch.optim.Optimizer, parts: int, part: int) -> None:
    for step in range(3):
        x, y = (value.chunk(parts)[part] for value in batch(step))
        model(x, y).backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()


def trained() -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_dp", "ep"))
    where = (mesh.get_group("ep").group_name, mesh.get_local_rank("ep"), 2)
    found: dict[str, Any] = {}
    for zero in (0, 3):
        plain = Moe(*where)
        if rank >= 2:  # values of the first holder of each expert win, not those of rank 0
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.zero_()
        model = fxshard.compile(
            plain,
            zero=zero,
            groups={"*.experts.*": mesh["ep_dp"]},
            optimizer=fxshard.AdamW(lr=1e-2, eps=EPS),
            lowering="eager",
        )
        steps(model, model.optimizer, 4, rank)
        found[f"moe {zero}"] = (full_gradients(model), model.full_state_dict(), float(model.clip_grad_norm_(1e9)))
        found["schedule"] = model.schedule
        model.optimizer.zero_grad()
        mine = [value.chunk(4)[rank] for value in batch(2)]
        with model.no_sync():
            (model(*mine) / 4).backward()
        (model(*mine) * 3 / 4).backward()
        found[f"accumulated {zero}"] = full_gradients(model)
    given = fxshard.Group(mesh["ep_dp"], divisor=1)
    model = fxshard.compile(Moe(*where), groups={"*.experts.*": given}, reduction="mean", lowering="eager")
    model(*(value.chunk(4)[rank] for value in batch(0))).backward()
    found["undivided"] = full_gradients(model)

    tp = (mesh.get_group("ep").group_name, mesh.get_local_rank("ep"), 2)
    model = fxshard.compile(
        TensorParallel(*tp), mesh=mesh["ep_dp"], optimizer=fxshard.AdamW(lr=1e-2, eps=EPS), lowering="eager"
    )
    channels = model._sharding.channels
    ours = {group.group_name for group in (channels.gather, channels.reduce) if group is not None}
    theirs = [mesh.get_group("ep"), mesh.get_group("ep_dp"), dist.group.WORLD]
    found["groups"] = (len(ours), sorted(ours & {group.group_name for group in theirs if group is not None}))
    steps(model, model.optimizer, 2, mesh.get_local_rank("ep_dp"))
    found["tp"] = (full_gradients(model), model.full_state_dict())
    found["errors"] = refused(mesh)
    return found


def refused(mesh: Any) -> list[str]:
    from torch.distributed.tensor import distribute_tensor

    spread = nn.Linear(4, 4)
    spread.weight = nn.Parameter(distribute_tensor(spread.weight.detach(), mesh["ep"]))
    cases: list[tuple[nn.Module, dict[str, Any]]] = [
        (nn.Linear(4, 4), {"groups": {"*.experts.*": mesh["ep_dp"]}}),
        (nn.Linear(4, 4), {"mesh": mesh["ep"], "groups": {"weight": mesh["ep_dp"]}}),
        (nn.Linear(4, 4), {"groups": {"weight": 2}}),
        (spread, {}),
    ]
    said = []
    for module, options in cases:
        try:
            fxshard.compile(copy.deepcopy(module) if module is not spread else module, **options)
        except fxshard.ConfigError as error:
            said.append(str(error))
    return said


def reference(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, fused=True)
    steps(model, optimizer, 1, 0)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, model.state_dict()


@pytest.fixture(scope="module")
def found(ranks: Pool) -> list[dict[str, Any]]:
    return ranks(4, trained)


def part(name: str, value: Tensor, rank: int) -> Tensor:
    """What rank ``rank`` holds of a tensor of the whole model."""
    return value.chunk(2)[rank % 2] if ".experts." in name else value


@pytest.mark.shows("L10", "S9", "O7")
def test_experts_train_as_in_one_process(found: list[dict[str, Any]]) -> None:
    gradients, state = reference(Moe())
    norm = torch.cat([value.flatten() for value in gradients.values()]).norm()
    for rank, by_case in enumerate(found):
        for zero in (0, 3):
            mine, params, clipped = by_case[f"moe {zero}"]
            again = by_case[f"accumulated {zero}"]
            for name, value in gradients.items():
                torch.testing.assert_close(mine[name], part(name, value, rank), rtol=1e-4, atol=1e-7, msg=name)
                torch.testing.assert_close(again[name], part(name, value, rank), rtol=1e-4, atol=1e-7, msg=name)
            for name, value in state.items():
                torch.testing.assert_close(params[name], part(name, value, rank), rtol=1e-5, atol=1e-6, msg=name)
            assert clipped == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.shows("L10", "S9")
def test_a_divisor_of_ones_own(found: list[dict[str, Any]]) -> None:
    model = Moe()
    model(*batch(0)).backward()
    for rank, by_case in enumerate(found):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            wanted = part(name, parameter.grad, rank) * (4 if ".experts." in name else 1)
            torch.testing.assert_close(by_case["undivided"][name], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.shows("L10")
def test_experts_have_buckets_and_groups_of_their_own(found: list[dict[str, Any]]) -> None:
    for by_case in found:
        schedule = by_case["schedule"]
        assert schedule.digest == found[0]["schedule"].digest
        for bucket in schedule.buckets:
            experts = [".experts." in name for name in bucket.params]
            assert len(set(experts)) == 1, "experts share a bucket with others"
            assert bucket.layout.ranks == (2 if experts[0] else 4) and bucket.domain.divisor == 4
        groups = {event.group for _, event in schedule.of(Kind.REDUCE, Kind.UNSHARD)}
        assert groups == {"cpu×4", "*.experts.* cpu×2"}


def test_collectives_of_the_model_are_left_intact(found: list[dict[str, Any]]) -> None:
    gradients, state = reference(TensorParallel())
    for rank, by_case in enumerate(found):
        mine, params = by_case["tp"]
        for name, dim in (("up", 0), ("down", 1)):
            torch.testing.assert_close(mine[name], gradients[name].chunk(2, dim)[rank % 2], rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(params[name], state[name].chunk(2, dim)[rank % 2], rtol=1e-5, atol=1e-6)


def test_no_group_is_one_that_the_model_could_use_too(found: list[dict[str, Any]]) -> None:
    """Ranks may interleave our collectives and the model's differently: they must not meet in one group."""
    for by_case in found:
        assert by_case["groups"] == (2, [])


def test_what_is_refused(found: list[dict[str, Any]]) -> None:
    for by_case in found:
        unmatched, foreign, not_a_mesh, dtensor = by_case["errors"]
        assert "matches no parameter" in unmatched and "'weight'" in unmatched
        assert "not data-parallel ranks of the model" in foreign
        assert "expected a DeviceMesh" in not_a_mesh
        assert "is a DTensor" in dtensor


def test_plan_with_groups() -> None:
    with torch.device("meta"):
        model = Moe()
    inputs = (torch.empty(TOKENS, DIM), torch.empty(TOKENS, DIM))
    schedule = fxshard.plan(model, inputs, world_size=16, groups={"*.experts.*": 2}, lowering="eager")
    experts = [bucket for bucket in schedule.buckets if bucket.domain.name]
    assert [bucket.layout.ranks for bucket in experts] == [2] * LAYERS
    assert {bucket.domain.divisor for bucket in schedule.buckets} == {16}
    schedule.simulate("h200")
    for wrong in (0, 3, "2"):
        with pytest.raises(fxshard.ConfigError, match=r"\*\.experts\.\*"):
            fxshard.plan(model, inputs, world_size=16, groups={"*.experts.*": wrong})  # type: ignore[dict-item]
