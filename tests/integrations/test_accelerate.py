"""Accelerate: a loop written for it trains the same with fxshard's ``Accelerator`` as with Accelerate's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fxshard
from tests.integrations.launched import launched, rows
from tests.pool import Pool
from tests.thorough import thorough

pytest.importorskip("accelerate", reason="needs Accelerate: pip install accelerate")

BATCHES = 8


class Loop:
    """A training loop as Accelerate's documentation writes it: optimizer and scheduler are made before ``prepare``."""

    def __init__(self, accelerator: Any) -> None:
        from tests.integrations.tiny import tiny

        model = tiny()
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


@dataclass
class Found:
    mine: list[Any]
    peer: list[Any]
    resumed: list[float]
    """Losses of the second half, in a run that loaded what was saved after the first."""
    files: list[str]


def runs(folder: str) -> Found:
    """fxshard, which saves in the middle, Accelerate alone, and fxshard from what was saved."""
    found = []
    for make in (own, theirs):
        with launched():
            loop = make()
            losses = loop.run(0, BATCHES // 2)
            if make is own:
                loop.accelerator.save_state(folder)
                loop.accelerator.save_state(folder)  # over the one before
            losses += loop.run(BATCHES // 2, BATCHES)
            weights = loop.accelerator.get_state_dict(loop.model)
            shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
            found.append([losses, loop.norms, loop.scheduler.get_last_lr(), shapes])
    with launched():
        second = own()
        second.accelerator.load_state(folder)
        resumed = second.run(BATCHES // 2, BATCHES)
    return Found(*found, resumed, sorted(path.name for path in Path(folder).iterdir()))


@pytest.fixture(scope="module")
def by_rank(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return ranks(2, runs, str(tmp_path_factory.mktemp("state")))


@pytest.mark.shows("I2")
def test_an_optimizer_and_a_scheduler_made_before_train_the_shards(by_rank: list[Found]) -> None:
    for found in by_rank:
        losses, norms, rates, shapes = found.mine
        assert losses == pytest.approx(found.peer[0], rel=1e-6) and len(set(losses)) > 1
        assert norms == pytest.approx(found.peer[1], rel=1e-5)
        assert rates == found.peer[2]
        assert shapes == found.peer[3]


def test_a_saved_state_continues_bitwise(by_rank: list[Found]) -> None:
    for found in by_rank:
        files = found.files
        assert found.resumed == found.mine[0][BATCHES // 2 :]
        assert "fxshard_0" in files and not [name for name in files if name.endswith(".before")]
        assert "optimizer.bin" not in files and "model.safetensors" not in files, "rank 0 has only a part of them"


def prepared(accelerator: Any, order: str) -> tuple[Any, Any]:
    """A model, and an optimizer that is made for the plain one, and with state."""
    from tests.integrations.tiny import tiny

    model = tiny()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-1, initial_accumulator_value=0.1)
    if order == "together":
        return accelerator.prepare(model, optimizer)  # type: ignore[no-any-return]
    if order == "model first":
        return accelerator.prepare_model(model), accelerator.prepare(optimizer)
    return tuple(reversed([accelerator.prepare(optimizer), accelerator.prepare(model)]))  # type: ignore[return-value]


def in_an_order(folder: str, order: str) -> tuple[list[list[float]], bool, bool]:
    """Losses with fxshard and with Accelerate alone; whether what was saved is the model; whether it is sharded."""
    import accelerate

    from fxshard.integrations.accelerate import Accelerator
    from tests.integrations.tiny import Tiny

    losses: list[list[float]] = []
    for make in (accelerate.Accelerator, lambda cpu: Accelerator(cpu=cpu, options={"lowering": "eager"})):
        with launched():
            accelerator = make(cpu=True)
            model, optimizer = prepared(accelerator, order)
            losses.append([])
            for batch in accelerator.prepare(DataLoader(rows(16), batch_size=2)):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
            assert len(optimizer.state) == len(list(model.parameters()))
            weights = accelerator.get_state_dict(model)
            accelerator.unwrap_model(model).save_pretrained(  # as scripts for Accelerate write it
                folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=weights
            )
            accelerator.wait_for_everyone()
            saved = Tiny.from_pretrained(folder).state_dict()
            accelerator.wait_for_everyone()
    same = saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in saved)
    return losses, same, isinstance(model, fxshard.ShardedModule)


@pytest.mark.parametrize("order", ["together", thorough("model first"), "optimizer first"])
def test_models_and_optimizers_are_prepared_in_any_order(ranks: Pool, tmp_path: Path, order: str) -> None:
    for (peer, mine), saved, sharded in ranks(2, in_an_order, str(tmp_path), order):
        assert mine == pytest.approx(peer, rel=1e-5) and len(set(mine)) == 4
        assert saved and sharded


def with_adafactor() -> str:
    from transformers.optimization import Adafactor

    from fxshard.integrations.accelerate import Accelerator
    from tests.integrations.tiny import tiny

    with launched():
        accelerator, model = Accelerator(cpu=True, options={"lowering": "eager"}), tiny()
        model, optimizer = accelerator.prepare(model, Adafactor(model.parameters()))
        accelerator.backward(model(**{name: row[None] for name, row in rows(1)[0].items()}).loss)
        with pytest.raises(fxshard.ConfigError) as caught:
            optimizer.step()
        return str(caught.value)


def test_adafactor_is_refused_on_several_ranks(ranks: Pool) -> None:
    assert all(
        "transformers.optimization.Adafactor needs whole parameters" in each for each in ranks(2, with_adafactor)
    )


def clipped_in_between() -> None:
    with launched():
        loop = own()
        batch = next(iter(loop.data))
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.model(**batch).loss)
            with pytest.raises(fxshard.StateError, match=r"if accelerator\.sync_gradients"):
                loop.accelerator.clip_grad_norm_((p for p in loop.model.parameters() if p.requires_grad), 1.0)


def test_clipping_between_micro_batches_is_refused(ranks: Pool) -> None:
    ranks(2, clipped_in_between)


def refusals() -> list[str]:
    from fxshard.integrations.accelerate import Accelerator
    from tests.integrations.tiny import tiny

    found = []
    with launched():
        model = tiny()
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
