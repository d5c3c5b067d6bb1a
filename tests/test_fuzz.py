"""The standing adversary, bounded: a few random programs, and a fault that it finds."""

from __future__ import annotations

import pytest

import fxshard
from fxshard.bench.fuzz import compare
from fxshard.bench.fuzz.compare import Loop
from tests.pool import Pool


def test_random_programs_are_those_of_plain_pytorch() -> None:
    assert [compare.run_program(seed, zero=3).text for seed in range(1)] == [""]


def some_programs() -> list[compare.Outcome]:
    return [compare.run_program(seed, zero=seed % 4) for seed in (11,)]


@pytest.mark.thorough
def test_random_programs_on_two_ranks(ranks: Pool) -> None:
    assert ranks(2, some_programs, timeout=120) == [[compare.Outcome("same")]] * 2


def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(seed for seed in range(100) if Loop(seed).optimizer == "own" and "step" in str(Loop(seed)))
    monkeypatch.setattr(compare, "AdamW", lambda lr, weight_decay: fxshard.AdamW(lr=2 * lr, weight_decay=weight_decay))
    assert compare.run_program(seed, zero=3).kind == "different"
