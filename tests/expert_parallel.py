"""A mixture of experts that sends tokens to the ranks of their experts and back: as many as the router says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from tests.pool import Pool
from tests.training import EPS

DIM, HIDDEN, EXPERTS, VOCAB, LAYERS = 16, 24, 4, 32, 1


class Experts(nn.Module):
    """``EXPERTS / ranks`` of them on this rank. Torch traces grouped products in bf16 only on a CPU: so each token is
    multiplied by the weights of its own expert, in fp32."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        up, down = torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5, torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5
        self.up = nn.Parameter(up.chunk(ranks)[rank].clone())
        self.down = nn.Parameter(down.chunk(ranks)[rank].clone())

    def forward(self, tokens: Tensor, expert: Tensor) -> Tensor:
        hidden = F.silu(torch.bmm(tokens[:, None], self.up[expert]))
        return torch.bmm(hidden, self.down[expert]).squeeze(1)


class ExpertParallel(nn.Module):
    """Dispatch, experts, combine. How many tokens go where is data: it travels first."""

    def __init__(self, group: str, rank: int, ranks: int) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.shared = nn.Linear(DIM, DIM, bias=False)
        self.experts = Experts(rank, ranks)
        self.group, self.ranks = group, ranks

    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(self.router(x), -1)
        gate, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int64, device=x.device).scatter_add(
            0, chosen, torch.ones_like(chosen)
        )
        there = self._computed(x[order], counts)
        back = torch.zeros_like(x).index_copy(0, order, there)
        return x + self.shared(x) + gate[:, None] * back

    def _computed(self, tokens: Tensor, counts: Tensor) -> Tensor:
        if self.ranks == 1:
            numbers = torch.arange(EXPERTS, device=tokens.device)
            return self.experts(tokens, numbers.repeat_interleave(counts, output_size=tokens.shape[0]))
        each = [EXPERTS // self.ranks] * self.ranks
        arriving = functional.all_to_all_single(counts, each, each, self.group)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        got = arriving.view(self.ranks, -1).sum(1).tolist()
        mine = functional.all_to_all_single_autograd(tokens, got, sent, self.group)
        numbers = torch.arange(EXPERTS // self.ranks, device=tokens.device).repeat(self.ranks)
        done = self.experts(mine, numbers.repeat_interleave(arriving, output_size=mine.shape[0]))
        return functional.all_to_all_single_autograd(done, sent, got, self.group)


class Model(nn.Module):
    """``Model()`` holds all experts; ``Model(group, rank, ranks)`` its part of them, with the same values."""

    def __init__(self, group: str = "", rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(ExpertParallel(group, rank, ranks) for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels.flatten())


def batch(step: int, parts: int = 1, part: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(VOCAB, (2, 8, 12), generator=generator).unbind()
    return tokens.chunk(parts)[part], labels.chunk(parts)[part]


def part(name: str, value: Tensor, rank: int, ranks: int = 2) -> Any:
    """What a rank holds of a tensor of the whole model."""
    return value.chunk(ranks)[rank % ranks] if ".experts." in name else value


MESH = {"ep_dp": 2, "ep": 2}
"""Four ranks, all of them data-parallel: each half of the experts is on two of them."""


def cut(model: nn.Module, mesh: DeviceMesh) -> Model:
    """This rank's part of the model."""
    return Model(mesh.get_group("ep").group_name, mesh.get_local_rank("ep"), mesh.size(1))


def options(zero: int, lowering: str = "eager") -> dict[str, Any]:
    return {"zero": zero, "lowering": lowering, "optimizer": fxshard.AdamW(lr=1e-2, eps=EPS)}


@contextmanager
def counts_in_the_graph() -> Iterator[None]:
    """How many tokens go where is read in forward: torch captures that if it is told to."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def planned(zero: int) -> str:
    """The schedule for four ranks, on a CPU. It makes torch's fake process group: on a rank that leaves its own."""
    dist.destroy_process_group()
    with torch.device("meta"):
        model = Model()
    with counts_in_the_graph():
        groups = {"*.experts.*": "ep_dp"}
        given = options(zero)
        plan = fxshard.plan(model, batch(0, 4, 0), mesh=MESH, parallelize=cut, groups=groups, hardware="cpu", **given)
    assert not dist.is_initialized(), "planning leaves no process group behind"
    return plan.to_json()


@cache
def plan_of(zero: int) -> fxshard.Schedule:
    """From a process of its own."""
    with Pool() as apart:
        return fxshard.Schedule.from_json(apart(1, planned, zero)[0])
