"""The mixture of experts that ``fxshard bench train`` times: a plain module, sharded and fused like any other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard
from fxshard.bench.models import Experts, Llama, LlamaConfig
from fxshard.bench.workloads import SIZES
from tests.pool import Pool
from tests.training import VOCAB, Run, fsdp2_run, plain_run, sharded_run

TINY = LlamaConfig(vocab=VOCAB, dim=16, layers=1, heads=2, hidden=24, experts=8)
STEPS = 2


class InTurn(Experts):
    """One expert after the other, each on all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).float().softmax(-1).topk(self.chosen)
        out = torch.zeros_like(x)
        for expert, (w1, w2, w3) in enumerate(zip(self.w1, self.w2, self.w3, strict=True)):
            weight = torch.where(chosen == expert, scores, 0).sum(-1, keepdim=True)
            out = out + weight * F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
        return out


def experts() -> nn.Module:
    torch.manual_seed(0)
    return Llama(TINY)


def experts_in_turn() -> nn.Module:
    model = experts()
    for layer in model.get_submodule("layers").children():
        layer.get_submodule("mlp").__class__ = InTurn
    return model


def trained() -> tuple[Run, Run]:
    return sharded_run(experts, steps=STEPS), fsdp2_run(experts, steps=STEPS)


@pytest.mark.thorough
def test_trains_like_experts_in_turn(ranks: Pool) -> None:
    reference = plain_run(2, experts_in_turn, steps=STEPS)
    for runs in ranks(2, trained):
        for run in runs:
            assert run.losses == pytest.approx(reference.losses, rel=2e-6)
            assert run.distance(reference) < 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_found(dtype: torch.dtype) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    report = fxshard.explain(experts().to(dtype), (tokens, tokens))
    assert len(report.fused) == TINY.layers and not report.left


def test_size() -> None:
    config, _, length = SIZES["moe-1b"]
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Llama(config).parameters())
    assert (config.experts, config.chosen, length) == (16, 2, 4096) and parameters == pytest.approx(1e9, rel=0.05)
