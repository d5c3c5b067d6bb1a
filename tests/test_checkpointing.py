"""Activation checkpointing and randomness: recomputed once, gathered once, drawn once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxshard
from fxshard.schedule.events import Kind, Phase
from tests.pool import Pool
from tests.thorough import thorough
from tests.toy import SwiGlu
from tests.training import VOCAB, full_gradients, this_ranks_batch


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    return create_selective_checkpoint_contexts(save_products)


class Checkpointed(nn.Module):
    """Every block recomputed in backward, with dropout between blocks where asked for."""

    def __init__(self, policy: str, dropout: float, layers: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.RMSNorm(32, eps=1e-5), SwiGlu(32, 88)) for _ in range(layers))
        self.head = nn.Linear(32, VOCAB, bias=False)
        self.policy, self.dropout = policy, dropout

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + (F.dropout(layer(x), self.dropout) if self.dropout else layer(x))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(x)
        for layer in self.layers:
            if self.policy == "none":
                hidden = self.block(layer, hidden)
            elif self.policy == "full":
                hidden = checkpoint(self.block, layer, hidden, use_reentrant=False)
            else:
                hidden = checkpoint(self.block, layer, hidden, use_reentrant=False, context_fn=selective)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def make(policy: str, dropout: float = 0.0, layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(policy, dropout, layers)


def gathers_in_backward(schedule: fxshard.Schedule) -> Counter[str]:
    return Counter(event.bucket for _, event in schedule.of(Kind.UNSHARD, phase=Phase.BACKWARD))


@pytest.mark.shows("S4")
def test_a_recomputed_block_is_gathered_once_and_saves_memory() -> None:
    x = torch.zeros(4, 16, dtype=torch.int64)
    plans = {
        policy: fxshard.plan(
            make(policy, layers=3),
            (x, x),
            world_size=2,
            hardware="cpu",
            debug=fxshard.Debug(keep_resident=False),
            lowering="eager",
        )
        for policy in ("none", "selective", "full")
    }
    for schedule in plans.values():
        schedule.verify()
        assert set(gathers_in_backward(schedule).values()) == {1}
        assert set(gathers_in_backward(schedule)) >= {"layers.0", "layers.1", "layers.2"}
    none, some, full = (plans[policy] for policy in ("none", "selective", "full"))
    assert full.saved_bytes < some.saved_bytes < none.saved_bytes
    assert full.saved_bytes < 0.3 * none.saved_bytes
    assert full.activation_bytes < 0.8 * none.activation_bytes
    assert "saved for backward" in str(full)
    assert full.simulate("cpu").peak_bytes < none.simulate("cpu").peak_bytes


def dropped(policy: str) -> tuple[float, float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss and gradients of one seeded step: fxshard's, and this rank's part of it in plain PyTorch."""
    model = fxshard.compile(make(policy, 0.3), lowering="eager")
    plain = make(policy, 0.3)
    batch = this_ranks_batch(0)
    torch.manual_seed(dist.get_rank())
    loss = model(*batch)
    loss.backward()
    torch.manual_seed(dist.get_rank())
    expected = plain(*batch)
    expected.backward()
    gradients = {}
    for name, parameter in plain.named_parameters():
        dist.all_reduce(parameter.grad)
        gradients[name] = parameter.grad / dist.get_world_size()
    return float(loss.detach()), float(expected.detach()), full_gradients(model), gradients


@pytest.mark.shows("S18")
@pytest.mark.parametrize("policy", [thorough("none"), thorough("full"), "selective"])
def test_dropout_is_that_of_plain_pytorch(ranks: Pool, policy: str) -> None:
    """Each rank draws what its own seed says, and backward uses the mask that forward drew."""
    for loss, expected, mine, gradients in ranks(2, dropped, policy):
        assert loss == pytest.approx(expected, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def masks(lowering: str) -> tuple[bool, float, float]:
    """Is backward's mask forward's, and which fraction is kept; the output of a rank that shares its batch."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4096))

        def block(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.sin(x * self.scale), 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    torch.manual_seed(1 + dist.get_rank())
    model = fxshard.compile(Drops(), zero=0, lowering=lowering)
    x = torch.ones(4096, requires_grad=True)
    out = model(x)
    out.sum().backward()
    assert x.grad is not None
    return bool(torch.equal(x.grad != 0, out != 0)), float((out != 0).double().mean()), float(out[:64].sum().detach())


@pytest.mark.shows("S18")
@pytest.mark.parametrize("lowering", ["eager", thorough("inductor")])
def test_recompute_reproduces_the_mask_and_ranks_draw_their_own(ranks: Pool, lowering: str) -> None:
    first, second = ranks(2, masks, lowering, timeout=350)
    for same, kept, _ in (first, second):
        assert same
        assert 0.45 < kept < 0.55
    assert first[2] != second[2]


class Half(Checkpointed):
    """One block is checkpointed, of the other a budget may decide."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.block, self.layers[0], self.emb(x), use_reentrant=False)
        hidden = self.block(self.layers[1], hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def test_a_plan_tries_less_memory_where_a_checkpointed_mask_is_drawn_again() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(fxshard.BudgetError, match="need at least"):
        fxshard.plan(Half("full", 0.5, 2), (tokens, tokens), world_size=2, memory_budget=1, lowering="eager")


def test_dropout_of_checkpointed_blocks_that_are_frozen() -> None:
    model = make("full", dropout=0.5).requires_grad_(False)
    tokens = torch.arange(32).view(2, 16)
    sharded = fxshard.compile(make("full", dropout=0.5).requires_grad_(False), lowering="eager")
    losses = []
    for each in (model, sharded):
        torch.manual_seed(1)
        losses.append(float(each(tokens, tokens)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
