"""QK-clip where tensor-parallel ranks have heads of their own: each scales those, as one process does with all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxshard
from fxshard.bench.tensor_parallel import cut
from tests.parallel import two_by_two
from tests.pool import Pool
from tests.test_qk_clip import ADAMW, LIMIT, VOCAB, Logits, loss_of, make, plain
from tests.thorough import thorough
from tests.toy import batch

DIM, WIDTH = 16, 8


class MultiQuery(nn.Module):
    """Two heads that share one of keys, then two with keys of their own. Each of two tensor-parallel ranks has one of
    the first and their keys, and both of the second.

    Gradients of these keys, of which every rank has those of its head, are not added up: only for steps that clip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, n, bias=n < DIM) for n in (2 * WIDTH, WIDTH, WIDTH, DIM))
        self.qkv = nn.Linear(DIM, 6 * WIDTH)
        for layer in (self.q, self.qkv):
            nn.init.normal_(layer.weight, std=0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (each.expand(-1, q.shape[1], -1, -1) for each in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        q, k, v = (each.unflatten(-1, (2, WIDTH)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return F.mse_loss(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), y)


def cut_queries(mesh: DeviceMesh, **gathered: Any) -> nn.Module:
    return parallelize_module(MultiQuery(), mesh["tp"], {"q": ColwiseParallel(**gathered), "o": RowwiseParallel()})


def numbers(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8 * step + rank)
    x, y = torch.randn(2, 2, 6, DIM, generator=generator)
    return x, y


def trained(kind: str, optimizer: Any, **options: Any) -> dict[str, torch.Tensor]:
    mesh = two_by_two()
    made = cut_queries(mesh) if kind == "multi-query" else cut(make(kind), mesh)
    model = fxshard.compile(made, mesh=mesh["dp"], optimizer=optimizer, lowering="eager", **options)
    for step in range(2):
        if kind == "multi-query":
            model(*numbers(step, mesh.get_local_rank("dp"))).backward()
        else:
            loss_of(model, kind, *batch(10 * step, 2, mesh.get_local_rank("dp"), VOCAB, size=2)).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
    return model.full_state_dict()


@pytest.mark.parametrize(("kind", "zero"), [thorough("grouped", 3), thorough("ours", 1)])
def test_equals_plain_pytorch_with_all_logits_on_two_by_two_ranks(ranks: Pool, kind: str, zero: int) -> None:
    limit = LIMIT[kind]
    reference, clipped = plain(kind, limit, lambda model: torch.optim.AdamW(model.parameters(), **ADAMW), 2, 1, 2)
    assert min(clipped) > 0
    choice = fxshard.AdamW(**ADAMW, qk_clip=limit)  # type: ignore[arg-type]
    for found in ranks(4, trained, kind, choice, zero=zero):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=name)


def clipped_in_one_process(limit: float) -> tuple[nn.Module, list[int]]:
    """The model after two steps that only clip, and how many heads of each attention that changed."""
    model, count = MultiQuery(), [0, 0]
    for step in range(2):
        x, y = (torch.cat(parts) for parts in zip(numbers(step, 0), numbers(step, 1), strict=True))
        with Logits() as spy, torch.no_grad():
            model(x, y)
        for attention, of_heads in enumerate(spy.largest):
            for head, logit in enumerate(of_heads.tolist()):
                if logit > limit:
                    count[attention] += 1
                    _scale(model, attention, head, limit / logit)
    return model, count


def _scale(model: MultiQuery, attention: int, head: int, factor: float) -> None:
    own = slice(head * WIDTH, (head + 1) * WIDTH)
    if attention == 0:
        scaled = [(each.detach()[own], factor) for each in model.q.parameters()]
    else:
        parts = [part for each in model.qkv.parameters() for part in each.detach().chunk(3)[:2]]
        scaled = [(part[own], math.sqrt(factor)) for part in parts]
    for rows, by in scaled:
        rows.mul_(by)


@pytest.mark.thorough
def test_keys_that_ranks_share_stay_and_heads_on_all_ranks_are_scaled_alike(ranks: Pool) -> None:
    limit = 0.8
    reference, count = clipped_in_one_process(limit)
    assert min(count) > 1
    choice = fxshard.AdamW(lr=0.0, qk_clip=limit)
    for found in ranks(4, trained, "multi-query", choice, zero=2):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=name)


def exchanged() -> str:
    """Queries of all heads on all ranks, after a product with a part of the weight."""
    mesh = two_by_two()
    model = parallelize_module(MultiQuery(), mesh["tp"], {"q": ColwiseParallel(output_layouts=Replicate())})
    sharded = fxshard.compile(model, mesh=mesh["dp"], optimizer=fxshard.AdamW(qk_clip=1.0), lowering="eager")
    with pytest.raises(fxshard.CaptureError) as caught:
        sharded(*numbers(0, 0))
    return str(caught.value)


def test_queries_that_ranks_exchange_are_refused_by_name(ranks: Pool) -> None:
    for said in ranks(4, exchanged):
        assert "tensor-parallel ranks exchange them at q" in said and "leave each rank its own heads" in said
