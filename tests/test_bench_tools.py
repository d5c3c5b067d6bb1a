"""``fxshard bench tools``: contenders in turns, the median of their rounds, and none that would not be what it says."""

from __future__ import annotations

import sys
from itertools import count

import pytest

from fxshard.bench import tools


def test_contenders_take_turns_and_the_median_counts() -> None:
    order: list[str] = []
    took = {"loop": iter([100.0, 90.0, 110.0]), "trainer": iter([300.0, 200.0, 150.0])}
    number = count()

    def run(name: str, device: str, steps: int) -> dict[str, float]:
        order.append(name)
        return {"step_ms": next(took[name]), "peak_gib": 1.0, "loss": float(next(number))}

    table = tools.compare(["loop", "trainer"], "cpu", 5, 3, run)
    assert order == ["loop", "trainer"] * 3
    assert str(table).splitlines()[-1].split()[:3] == ["trainer", "200.0", "2.000"]


def test_no_fsdp2_contender_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tools", "--device", "cpu", "--contenders", "trainer-fsdp2"])
    with pytest.raises(SystemExit):
        tools.main()
    assert "Accelerate has no FSDP for CPUs" in capsys.readouterr().err
