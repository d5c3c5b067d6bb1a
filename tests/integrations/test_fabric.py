"""Lightning Fabric: a loop trains the same with fxshard's strategy as with DDP, and resumes bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fxshard
from tests.integrations.launched import launched, rows
from tests.pool import Pool

pytest.importorskip("lightning_fabric", reason="needs Lightning Fabric: pip install lightning-fabric")

STEPS = 4


class Loop:
    """A training loop as Fabric's documentation writes it; every second micro-batch makes a step."""

    def __init__(self, strategy: Any) -> None:
        from lightning_fabric import Fabric

        from tests.integrations.tiny import tiny

        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        self.fabric.launch()
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.step = 0

    def run(self, until: int) -> list[float]:
        losses = []
        while self.step < until:
            for part in range(2):
                tokens = rows(4 * STEPS)[4 * self.step + 2 * part + self.fabric.global_rank]["input_ids"][None]
                with self.fabric.no_backward_sync(self.model, enabled=part == 0):
                    loss = self.model(input_ids=tokens, labels=tokens).loss
                    self.fabric.backward(loss / 2)
                losses.append(self.fabric.all_reduce(loss.detach()).item())
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
        return losses

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "step": self.step}


def own() -> Loop:
    from fxshard.integrations.fabric import FxshardStrategy

    return Loop(FxshardStrategy(lowering="eager"))


def runs(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with launched():
        loop = own()
        found["straight"] = loop.run(STEPS // 2)
        loop.fabric.save(Path(folder, "state"), {**loop.state(), "step": 0})
        loop.fabric.save(Path(folder, "state"), loop.state())  # over the one before, as a loop that keeps the last
        found["straight"] += loop.run(STEPS)
        again = own()
        state = again.state()
        again.fabric.load(Path(folder, "state"), state)
        again.step = state["step"]
        found["resumed"] = again.run(STEPS)
        found["peer"] = Loop("ddp").run(STEPS)
    return found


@pytest.mark.shows("I6")
def test_trains_saves_and_resumes(ranks: Pool, tmp_path: Path) -> None:
    for found in ranks(2, runs, str(tmp_path)):
        assert found["straight"] == pytest.approx(found["peer"], rel=1e-6)
        assert found["resumed"] == found["straight"][STEPS:], "the second half, bitwise"


def compiled_before() -> tuple[list[float], int, bool]:
    """The first losses of a model that was compiled before ``setup``, with an optimizer made after it."""
    from lightning_fabric import Fabric

    from fxshard.integrations.fabric import FxshardStrategy
    from tests.integrations.tiny import tiny

    with launched():
        fabric = Fabric(accelerator="cpu", devices=2, strategy=FxshardStrategy())
        fabric.launch()
        model = fabric.setup_module(fxshard.compile(tiny(), lowering="eager"))
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for step in range(2):
            tokens = torch.stack([row["input_ids"] for row in rows(8)[4 * step + fabric.global_rank :: 2][:2]])
            loss = model(input_ids=tokens, labels=tokens).loss
            fabric.backward(loss)
            losses.append(fabric.all_reduce(loss.detach()).item())
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        same = model.state_dict().keys() == tiny().state_dict().keys()
        return losses, sum(parameter.numel() for parameter in model.parameters()), same


def test_a_model_compiled_before_setup_has_its_parameters(ranks: Pool) -> None:
    from tests.integrations.tiny import tiny

    plain = tiny()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = []
    for step in range(2):
        tokens = torch.stack([row["input_ids"] for row in rows(8)[4 * step : 4 * step + 4]])
        loss = plain(input_ids=tokens, labels=tokens).loss
        loss.backward()
        expected.append(loss.item())
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for losses, count, same in ranks(2, compiled_before):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert same and count == sum(parameter.numel() for parameter in plain.parameters())


def clipped_by_optimizer() -> list[list[float]]:
    """Losses and norms of a head and a body with an optimizer each, of which one is clipped; fxshard's, then DDP's."""
    from lightning_fabric import Fabric

    from fxshard.integrations.fabric import FxshardStrategy
    from tests.integrations.tiny import tiny

    found = []
    for strategy in (FxshardStrategy(lowering="eager"), "ddp"):
        with launched():
            fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
            fabric.launch()
            plain = tiny()
            body = [parameter for name, parameter in plain.named_parameters() if "head" not in name]
            first, second = torch.optim.SGD(plain.head.parameters(), lr=1.0), torch.optim.SGD(body, lr=1.0)
            model, first, second = fabric.setup(plain, first, second)
            figures = []
            for step in range(3):
                tokens = rows(8)[2 * step + fabric.global_rank]["input_ids"][None]
                loss = model(input_ids=tokens, labels=tokens).loss
                fabric.backward(loss)
                norm = fabric.clip_gradients(model, first, max_norm=1e-3)
                figures += [fabric.all_reduce(loss.detach()).item(), float(norm)]
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(figures)
    return found


def test_gradients_of_one_of_two_optimizers_are_clipped_by_their_own_norm(ranks: Pool) -> None:
    for mine, peer in ranks(2, clipped_by_optimizer):
        assert mine == pytest.approx(peer, rel=1e-5)


def refused() -> str:
    from lightning_fabric import Fabric

    from fxshard.integrations.fabric import FxshardStrategy

    with launched():
        fabric = Fabric(accelerator="cpu", devices=1, strategy=FxshardStrategy(), precision="bf16-mixed")
        fabric.launch()
        with pytest.raises(fxshard.ConfigError) as caught:
            fabric.setup(torch.nn.Linear(2, 2))
    return str(caught.value)


def test_autocast_is_refused(ranks: Pool) -> None:
    assert "precision=fxshard.Precision" in ranks(1, refused)[0]
