"""Training and evaluation in any order, other shapes, what goes into a model and what comes out of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxshard
from tests.pool import Pool
from tests.training import EPS, VOCAB, llama


def tokens(size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * size + length)
    return tuple(torch.randint(VOCAB, (2, size, length), generator=generator).unbind())  # type: ignore[return-value]


def interleaved(zero: int) -> tuple[list[float], list[float], dict[str, int]]:
    """Losses of a loop that trains, evaluates in three ways and changes shapes, and of the same in plain PyTorch.

    All ranks see the same batches, so that the loss of one is the loss of all.
    """
    model = fxshard.compile(llama(), zero=zero, optimizer=fxshard.AdamW(lr=1e-3, eps=EPS), lowering="eager")
    plain = llama()
    found: dict[nn.Module, list[float]] = {model: [], plain: []}
    for each, optimizer in (
        (model, model.optimizer),
        (plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=EPS, fused=True)),
    ):
        losses = found[each]
        with torch.inference_mode():  # before anything else: what is allocated now must serve training too
            losses.append(float(each(*tokens(4, 16))))
        for size, length in ((4, 16), (2, 8), (4, 16), (3, 12)):
            each.train()
            loss = each(*tokens(size, length))
            each.eval()
            with torch.no_grad():  # between forward and backward
                losses.append(float(each(*tokens(4, 16))))
                losses.append(float(each(*tokens(2, 8))))
            loss.backward()
            with torch.inference_mode():
                losses.append(float(each(*tokens(4, 16))))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    counts = model.compilations
    arena = model._sharding.engine.arena.bytes
    largest = max(schedule.arena_bytes for schedule in model.schedules)
    return found[model], found[plain], {"captures": counts.captures, "arena": arena, "largest": largest}


@pytest.mark.shows("S12")
@pytest.mark.parametrize("zero", [2, 3])
def test_training_and_evaluation_in_any_order_and_shape(ranks: Pool, zero: int) -> None:
    for mine, plain, counts in ranks(2, interleaved, zero):
        assert mine == pytest.approx(plain, rel=1e-5)
        assert counts["arena"] == counts["largest"]  # every program plans its own places in one arena
        assert 2 <= counts["captures"] <= 6  # the first other shape recompiles, with sizes left open from then on


def dynamic(lowering: str) -> tuple[list[float], list[float], list[int]]:
    model = fxshard.compile(llama(), dynamic=True, lowering=lowering, optimizer=fxshard.AdamW(lr=1e-3, eps=EPS))
    plain = llama()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=EPS, fused=True)
    mine, theirs, captures = [], [], []
    for size, length in ((4, 16), (2, 8), (3, 12)):
        loss, expected = model(*tokens(size, length)), plain(*tokens(size, length))
        loss.backward()
        expected.backward()
        for o in (model.optimizer, optimizer):
            o.step()
            o.zero_grad()
        mine.append(float(loss.detach()))
        theirs.append(float(expected.detach()))
        captures.append(model.compilations.captures)
    return mine, theirs, captures


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_symbolic_sizes(ranks: Pool, lowering: str) -> None:
    for mine, plain, captures in ranks(2, dynamic, lowering, timeout=170):
        assert mine == pytest.approx(plain, rel=1e-5)
        assert len(set(captures)) == 1  # what was captured for the first shape serves every shape
