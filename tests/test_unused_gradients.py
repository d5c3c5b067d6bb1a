"""A parameter that got no gradient in a step is left alone by every optimizer, as in plain PyTorch, FSDP2 and DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from tests.pool import Pool
from tests.thorough import thorough

ALTERNATING = (0, 0, 1, 0, 1, 1, 0, 1, 0, 0)


class Branches(nn.Module):
    """Heads of which forward uses one; one layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
        self.never = nn.Linear(4, 4)
        self.scales = nn.ParameterList([torch.ones(1)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        x = torch.relu(self.body(x))
        return self.heads[which](x * self.scales[0] if which else x).square().mean()


class Results(Branches):
    """All heads at once; the loop takes one of the losses."""

    def forward(self, x: torch.Tensor, which: int) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        x = torch.relu(self.body(x))
        return self.heads[0](x).square().mean(), self.heads[1](x * self.scales[0]).square().mean()


ONE_UNIT = [["body", "heads", "never", "scales"]]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, chosen: Callable[[int], int] = ALTERNATING.__getitem__
) -> list[Any]:
    """Losses of ten steps, and which parameters had no gradient."""
    found: list[Any] = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(10):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x, chosen(step))
        loss = loss[chosen(step)] if isinstance(loss, tuple) else loss
        loss.backward()
        none = [name.removeprefix("module.") for name, p in model.named_parameters() if p.grad is None]
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), none))
    return found


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())


TORCHS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch AdamW": lambda params: torch.optim.AdamW(params, **SETTINGS, fused=True),
    "torch SGD": lambda params: torch.optim.SGD(params, **SETTINGS, momentum=0.9),
    "torch Adagrad": lambda params: torch.optim.Adagrad(params, **SETTINGS),
}


@pytest.mark.shows("S7")
@pytest.mark.parametrize(
    ("net", "kind", "units"),
    [
        *((Branches, kind, ONE_UNIT) for kind in ("AdamW", "torch AdamW")),
        thorough(Branches, "torch SGD", None),
        (Results, "Muon", None),
        *(thorough(Branches, kind, ONE_UNIT) for kind in ("Muon", "torch SGD", "torch Adagrad")),
        thorough(Results, "AdamW", ONE_UNIT),
    ],
)
def test_ten_steps_are_those_of_plain_pytorch(net: type[Branches], kind: str, units: Any) -> None:
    choice = {"AdamW": fxshard.AdamW(**SETTINGS), "Muon": fxshard.Muon(**SETTINGS)}.get(kind)
    plain = net()
    if isinstance(choice, fxshard.Muon):
        theirs: torch.optim.Optimizer = choice.build(plain)
    else:
        theirs = TORCHS["torch AdamW" if choice else kind](plain.parameters())
    model = fxshard.compile(net(), optimizer=choice, units=units, lowering="eager")
    ours = model.optimizer if choice else TORCHS[kind](model.parameters())
    expected = train(plain, theirs)
    assert "never.weight" in expected[0][1] and "heads.1.weight" in expected[0][1]  # the reference leaves them out
    assert train(model, ours) == expected
    assert same(values(model), values(plain))
    assert all(not state.get("step", 0) for p, state in ours.state.items() if p is model.never.weight)


def beside_fsdp2(net: type[Branches], zero: int) -> tuple[bool, bool]:
    """Ranks use the same heads; FSDP2 has all of the model in one group, as the unit here."""
    theirs = net()
    fully_shard(theirs)
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), **SETTINGS, fused=True))
    choice = fxshard.AdamW(**SETTINGS)
    model = fxshard.compile(net(), zero=zero, optimizer=choice, units=ONE_UNIT, lowering="eager")
    found = train(model, model.optimizer)
    full = {name: p.full_tensor() for name, p in theirs.named_parameters()}
    return found == expected, same(model.full_state_dict(), full)


@pytest.mark.shows("S7")
@pytest.mark.parametrize("zero", [thorough(0), thorough(1), thorough(2), 3])
def test_two_ranks_are_fsdp2s(ranks: Pool, zero: int) -> None:
    assert ranks(2, beside_fsdp2, Branches, zero) == [(True, True)] * 2


def beside_ddp(net: type[Branches], zero: int, first_alike: int) -> tuple[bool, bool, bool]:
    """Ranks use different heads, from a step on; DDP is told to look for what was used."""

    def chosen(step: int) -> int:
        return ALTERNATING[step] if step < first_alike else (ALTERNATING[step] + dist.get_rank()) % 2

    plain = net()
    theirs = DistributedDataParallel(plain, find_unused_parameters=True)
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), **SETTINGS, fused=True), chosen)
    choice = fxshard.AdamW(**SETTINGS)
    model = fxshard.compile(net(), zero=zero, optimizer=choice, units=ONE_UNIT, lowering="eager")
    found = train(model, model.optimizer, chosen)
    alone = expected[-1][1] == ["never.weight", "never.bias"]
    return found == expected, same(model.full_state_dict(), values(plain)), alone


@pytest.mark.shows("S7")
@pytest.mark.parametrize(
    ("net", "zero", "alike"),
    [
        thorough(Branches, 0, 0),
        thorough(Branches, 1, 3),
        thorough(Branches, 2, 0),
        thorough(Branches, 3, 3),
        (Branches, 1, 0),
        thorough(Results, 3, 3),
        thorough(Results, 1, 0),
    ],
)
def test_what_one_rank_used_is_updated_on_all(ranks: Pool, net: type[Branches], zero: int, alike: int) -> None:
    assert ranks(2, beside_ddp, net, zero, alike) == [(True, True, True)] * 2


def micro_batches(model: Any, chosen: list[list[int]]) -> list[list[str]]:
    """Steps of micro-batches, of which the last reduces; returns which parameters had no gradient."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for number, step in enumerate(chosen):
        for i, which in enumerate(step):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + 10 * i + dist.get_rank()))
            if i < len(step) - 1:
                with model.no_sync():
                    model(x, which).backward()
            else:
                model(x, which).backward()
        found.append([name.removeprefix("module.") for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    return found


def accumulated(zero: int) -> tuple[bool, bool]:
    steps = [[0, 0], [0, 1], [1, 1]]
    plain = Branches()
    expected = micro_batches(DistributedDataParallel(plain, find_unused_parameters=True), steps)
    model = fxshard.compile(Branches(), zero=zero, units=ONE_UNIT, lowering="eager")
    found = micro_batches(model, steps)
    close = all(torch.allclose(value, values(plain)[name]) for name, value in model.full_state_dict().items())
    return found == expected, close


@pytest.mark.parametrize("zero", [thorough(0), thorough(1), 3])
def test_micro_batches_count_together(ranks: Pool, zero: int) -> None:
    assert ranks(2, accumulated, zero) == [(True, True)] * 2


class Experts(nn.Module):
    """An expert of its own on every other rank, used by one of the two that hold it, and on some ranks by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.experts = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, use_second: bool) -> torch.Tensor:
        x = self.experts[0](self.body(x))
        return (self.experts[1](x) if use_second else x).square().mean()


def experts_without_gradient() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_dp", "ep"))
    groups, units = {"experts.*": mesh["ep_dp"]}, [["body", "experts"]]
    model = fxshard.compile(Experts(), groups=groups, units=units, lowering="eager")
    model(torch.ones(2, 4), dist.get_rank() == 1).backward()  # rank 3 holds the same expert, ranks 0 and 2 another
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


@pytest.mark.thorough
def test_experts_of_other_ranks_are_others(ranks: Pool) -> None:
    none = ["experts.1.weight", "experts.1.bias"]
    assert ranks(4, experts_without_gradient) == [none, [], none, []]


class Started(TorchDispatchMode):
    """The names of operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def asked(net: Callable[[], nn.Module], units: Any, *inputs: Any) -> int:
    """How many all-reduces a second backward and step start: ZeRO-3 on plain ranks schedules none."""
    model = fxshard.compile(net(), optimizer=fxshard.AdamW(), units=units, lowering="eager")
    for _ in range(2):
        loss = model(*inputs).square().mean()
        with Started() as started:
            loss.backward()
            model.optimizer.step()
        model.optimizer.zero_grad()
    assert "c10d._reduce_scatter_base_.default" in started.names
    return started.names.count("c10d.allreduce_.default")


def plain_stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.thorough
def test_nothing_is_asked_where_every_parameter_has_a_gradient(ranks: Pool) -> None:
    assert ranks(2, asked, plain_stack, None, torch.randn(2, 8)) == [0, 0]
    assert ranks(2, asked, Branches, ONE_UNIT, torch.randn(2, 8), 0) == [1, 1]
