"""The standing adversary, bounded: a few random programs, and a fault that it finds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxshard.bench.fuzz import compare
from fxshard.bench.fuzz.compare import Loop
from fxshard.bench.fuzz.settings import Settings
from tests.pool import Pool


def test_random_programs_are_those_of_plain_pytorch() -> None:
    assert [compare.run_program(seed, zero=3).text for seed in range(1)] == [""]


def some_programs() -> list[compare.Outcome]:
    return [compare.run_program(seed, zero=seed % 4) for seed in (11,)]


@pytest.mark.thorough
def test_random_programs_on_two_ranks(ranks: Pool) -> None:
    assert ranks(2, some_programs, timeout=120) == [[compare.Outcome("same")]] * 2


def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(seed for seed in range(0, 100, 4) if "step" in str(Loop(seed)))
    right = Settings.plain_optimizer

    def faster(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = right(settings, model)
        for group in optimizer.param_groups:
            group["lr"] *= 2
        return optimizer

    monkeypatch.setattr(Settings, "plain_optimizer", faster)
    assert compare.run_program(seed, zero=3).kind == "different"


def test_a_program_goes_on_out_of_a_checkpoint() -> None:
    assert compare.run_program(1, zero=1).text == ""
