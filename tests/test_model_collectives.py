"""Ranks whose models communicate in different orders refuse to start, all of them, before anything is sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

import fxshard
from fxshard.schedule.events import Kind
from tests.pool import Pool, RankError
from tests.toy import Linears


class TwoSums(Linears):
    """Sums over ranks in two groups; ``swapped``: the second group first."""

    def __init__(self, groups: list[str], swapped: bool) -> None:
        super().__init__(2)
        self.groups = groups[::-1] if swapped else groups

    def forward(self, x: Tensor) -> Tensor:
        for layer, group in zip(self.layers, self.groups, strict=True):
            x = x + functional.all_reduce(layer(x).detach(), "sum", group)
        return x.square().mean() + self.layers[0](x).mean()


def step(swapped_on: int | None) -> str:
    groups = [dist.new_group([0, 1], group_desc=name).group_name for name in ("tp", "ep")]
    model = fxshard.compile(TwoSums(groups, swapped=dist.get_rank() == swapped_on), lowering="eager")
    model(torch.ones(2, 8)).backward()
    return model.schedule.digest


@pytest.mark.shows("T5", "P5")
def test_another_order_on_one_rank_is_an_error_on_every_rank(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, step, 1, timeout=60)
    assert caught.value.types == {0: "RankDivergenceError", 1: "RankDivergenceError"}
    assert "all_reduce torch.float32 in tp×2" in str(caught.value) and "in ep×2" in str(caught.value)


@pytest.mark.shows("T5")
def test_the_same_order_runs(ranks: Pool) -> None:
    first, second = ranks(2, step, None, timeout=60)
    assert first == second


class Coalesced(nn.Module):
    """Collectives of several tensors at once: sums, gathers, and sums of which each rank has a part."""

    def __init__(self, group: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        first, second = functional.all_reduce_coalesced([y.detach(), (2 * y).detach()], "sum", self.group)
        third, fourth = functional.all_gather_into_tensor_coalesced([first + 1, (y * x).detach()], self.group)
        parts = functional.reduce_scatter_tensor_coalesced([third, fourth], "sum", [0, 0], self.group)
        return (y * (first + second * parts[0] + parts[1])).square().mean()


def coalesced() -> tuple[float, float, list[Tensor], list[str]]:
    group = dist.new_group([0, 1], group_desc="tp").group_name
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    plain = Coalesced(group)
    wanted = plain(x)
    wanted.backward()
    gradient = plain.layer.weight.grad
    assert gradient is not None
    dist.all_reduce(gradient)
    model = fxshard.compile(Coalesced(group), zero=0, lowering="eager")
    found = model(x)
    found.backward()
    mine = model.layer.weight.grad.to_local()
    ops = [event.op for _, event in model.schedule.of(Kind.COLLECTIVE)]
    return float(wanted.detach()), float(found.detach()), [gradient / 2, mine], ops


@pytest.mark.shows("T5")
def test_coalesced_collectives_are_one_for_each_tensor(ranks: Pool) -> None:
    for wanted, found, (gradient, mine), ops in ranks(2, coalesced, timeout=60):
        assert found == wanted
        torch.testing.assert_close(mine, gradient)
        assert sorted(ops) == sorted(2 * ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"])
