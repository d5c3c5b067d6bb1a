"""Accelerate: a loop written for it trains the same with fxshard's ``Accelerator`` as with Accelerate's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fxshard
from tests.integrations.launched import launched, llama, rows
from tests.pool import Pool

pytest.importorskip("accelerate", reason="needs Accelerate: pip install accelerate")

BATCHES = 8


class Loop:
    """A training loop as Accelerate's documentation writes it: optimizer and scheduler are made before ``prepare``."""

    def __init__(self, accelerator: Any) -> None:
        model = llama()
        self.accelerator = accelerator
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 3e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data = DataLoader(rows(4 * BATCHES), batch_size=2)
        self.model, self.optimizer, self.data, self.scheduler = accelerator.prepare(model, optimizer, data, scheduler)
        self.norms: list[float] = []

    def run(self, start: int, stop: int) -> list[float]:
        losses = []
        for batch in list(self.data)[start:stop]:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(self.accelerator.gather_for_metrics(loss.detach().reshape(1)).mean().item())
        return losses


def own(**options: Any) -> Loop:
    from fxshard.integrations.accelerate import Accelerator

    options.setdefault("lowering", "eager")
    return Loop(Accelerator(cpu=True, gradient_accumulation_steps=2, options=options))


def theirs() -> Loop:
    from accelerate import Accelerator

    return Loop(Accelerator(cpu=True, gradient_accumulation_steps=2))


def both() -> tuple[list[Any], list[Any]]:
    found = []
    for make in (own, theirs):
        with launched():
            loop = make()
            losses = loop.run(0, BATCHES)
            weights = loop.accelerator.get_state_dict(loop.model)
            shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
            found.append([losses, loop.norms, loop.scheduler.get_last_lr(), shapes])
    return found[0], found[1]


@pytest.mark.shows("I2")
def test_an_optimizer_and_a_scheduler_made_before_train_the_shards(ranks: Pool) -> None:
    for mine, peer in ranks(2, both):
        losses, norms, rates, shapes = mine
        assert losses == pytest.approx(peer[0], rel=1e-6) and len(set(losses)) > 1
        assert norms == pytest.approx(peer[1], rel=1e-5)
        assert rates == peer[2]
        assert shapes == peer[3]


def interrupted(folder: str) -> tuple[list[float], list[float], list[str]]:
    """Losses of a run, and of one that stops in the middle and goes on from what it saved."""
    with launched():
        straight = own().run(0, BATCHES)
    with launched():
        first = own()
        first.run(0, BATCHES // 2)
        first.accelerator.save_state(folder)
        first.accelerator.save_state(folder)  # over the one before
    with launched():
        second = own()
        second.accelerator.load_state(folder)
        rest = second.run(BATCHES // 2, BATCHES)
    return straight[BATCHES // 2 :], rest, sorted(path.name for path in Path(folder).iterdir())


def test_a_saved_state_continues_bitwise(ranks: Pool, tmp_path: Path) -> None:
    for straight, rest, files in ranks(2, interrupted, str(tmp_path)):
        assert rest == straight
        assert "fxshard_0" in files and not [name for name in files if name.endswith(".before")]
        assert "optimizer.bin" not in files and "model.safetensors" not in files, "rank 0 has only a part of them"


def refusals() -> list[str]:
    from fxshard.integrations.accelerate import Accelerator

    found = []
    with launched():
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters())
        model(**{name: row[None] for name, row in rows(1)[0].items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(fxshard.ConfigError) as caught:
            Accelerator(cpu=True).prepare(model, optimizer)
        found.append(str(caught.value))
    with launched():
        with pytest.raises(fxshard.ConfigError) as caught:
            Accelerator(cpu=True, mixed_precision="fp16")
        found.append(str(caught.value))
    return found


def test_what_is_refused(ranks: Pool) -> None:
    stepped, fp16 = ranks(1, refusals)[0]
    assert "before its first step" in stepped
    assert "bf16" in fp16
