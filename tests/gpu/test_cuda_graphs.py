"""``cuda_graphs=True`` on a GPU: bitwise what the same model does without it, whatever the loop does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from tests.gpu.waiting import no_waiting
from tests.replaying import SCENARIOS, Pair, accumulated, both, counts, reasons, same, step
from tests.stack import Stack

pytestmark = pytest.mark.gpu
DENSE = LlamaConfig(vocab=512, dim=256, layers=3, heads=4, hidden=704)
EXPERTS = LlamaConfig(vocab=512, dim=256, layers=3, heads=4, hidden=256, experts=8)
BF16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)


def pair(make: Callable[[], nn.Module], **options: Any) -> Pair:
    models = []
    for graphs in (True, False):
        torch.manual_seed(0)
        with torch.device("cuda"):
            plain = make()
        given = {"lowering": "eager", "optimizer": fxshard.AdamW(lr=1e-3), "cuda_graphs": graphs, **options}
        models.append(fxshard.compile(plain, **given))
    return models[0], models[1]


def language_model(config: LlamaConfig) -> Llama:
    """Its embedding is frozen: Inductor adds up that gradient by atomic additions, whose order nobody knows."""
    model = Llama(config)
    model.embed.requires_grad_(False)
    return model


def tokens(number: int, rows: int = 2, length: int = 128) -> torch.Tensor:
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(number)).cuda()


def train(model: fxshard.ShardedModule, number: int, rows: int = 2) -> list[torch.Tensor]:
    x = tokens(number, rows)
    loss = model(x, x)
    loss.backward()
    norm = model.clip_grad_norm_(1.0)
    model.optimizer.step()
    model.optimizer.zero_grad()
    return [loss.detach(), norm]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_trains_bitwise_like_the_same_model_without_graphs(config: LlamaConfig, lowering: str) -> None:
    models = pair(lambda: language_model(config), precision=BF16, lowering=lowering)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keeping(model: fxshard.ShardedModule, number: int) -> list[torch.Tensor]:
        found = train(model, number)
        kept.extend((value, value.clone()) for value in found)
        return found

    for number in range(6):
        both(models, keeping, number)
    assert counts(models[0]) == (2, 8), reasons(models[0])
    assert same(models)
    assert all(torch.equal(now, then) for now, then in kept), "a loss that was kept has changed"


def test_a_steady_loop_is_captured_once() -> None:
    models = pair(lambda: language_model(EXPERTS), precision=BF16, optimizer=fxshard.Muon(lr=1e-2))
    for number in range(5):
        both(models, train, number)
    assert counts(models[0]) == (2, 6), reasons(models[0])
    for number in range(4):  # another shape is another program
        both(models, train, number, 1)
    assert same(models)


def test_whatever_a_loop_does_is_right() -> None:
    models = pair(Stack)
    for number in range(3):
        both(models, step(number))
    assert counts(models[0]) == (2, 2), reasons(models[0])
    for kind in SCENARIOS * 2:
        before = counts(models[0])
        both(models, kind)
        both(models, step(30))
        both(models, step(31))
        assert counts(models[0]) > before, kind
    assert same(models)


@pytest.mark.parametrize("how", ["plain", "no_sync", "zeroed"])
def test_accumulation_is_captured_too(how: str) -> None:
    models = pair(Stack)
    for number in range(5):
        both(models, accumulated, number, how)
    before = counts(models[0])
    both(models, accumulated, 9, how)
    assert counts(models[0]) == (before[0], before[1] + 6), reasons(models[0])
    assert same(models)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 64), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.second(nn.functional.dropout(self.first(x), 0.5)) - y).square().mean()


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_random_numbers_are_new_ones_and_the_same_as_without_graphs(lowering: str) -> None:
    models = pair(Dropping, lowering=lowering)

    def seeded(model: fxshard.ShardedModule, number: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        return [*step(0)(model), *step(0)(model)]

    for number in range(4):
        both(models, seeded, number)
    assert counts(models[0])[1] >= 8, reasons(models[0])
    losses = [float(step(0)(models[0])[0]) for _ in range(3)]
    assert len(set(losses)) == 3, "each replay drops others"


def test_a_replayed_step_synchronises_nowhere() -> None:
    model, _ = pair(lambda: language_model(EXPERTS), precision=BF16)
    x = tokens(0)

    def act() -> None:
        model(x, x).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()

    for _ in range(4):
        act()
    with no_waiting():
        act()
    assert counts(model)[1] >= 4


def test_memory_is_what_it_was() -> None:
    """But for the workspaces of cuBLAS, of which each stream has its own."""
    config = dataclasses.replace(DENSE, vocab=16384, dim=1024, layers=8, heads=16, hidden=2816)
    x = torch.randint(0, 512, (8, 1024)).cuda()
    peaks = []
    for graphs in (False, True):
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated()
        with torch.device("cuda"):
            plain = Llama(config)
        model = fxshard.compile(plain, precision=BF16, optimizer=fxshard.AdamW(), cuda_graphs=graphs)
        for _ in range(4):
            torch.cuda.reset_peak_memory_stats()
            model(x, x).backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
        captures = model.report.cuda_graphs
        peaks.append(torch.cuda.max_memory_allocated() - before + (captures.idle_bytes if captures else 0))
        del model, plain
    print(f"peak {peaks[0] / 2**20:.0f} MiB, with graphs {peaks[1] / 2**20:.0f} MiB")
    assert peaks[1] <= 1.05 * peaks[0] + 160 * 2**20


@torch.library.custom_op("fxshard_tests::peek", mutates_args=())
def peek(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum().item() == x.sum().item())


@peek.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Peeking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.lin(peek(x)) - y).square().mean()


def test_what_waits_for_the_device_is_refused() -> None:
    """The last test of this file: a capture that failed is not something to build on."""
    model, _ = pair(Peeking)
    step(0)(model)
    with pytest.raises(fxshard.CaptureError, match="forward could not be captured"):
        step(1)(model)
    other, _ = pair(Stack)
    for number in range(4):
        step(number)(other)
    assert counts(other) == (2, 4), reasons(other)
