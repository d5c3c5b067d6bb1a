"""``fxshard doctor``: it tells what is here, what will be chosen, and what will fail."""

from __future__ import annotations

import json

import pytest
import torch

from fxshard._torch import private
from fxshard.cli import doctor
from fxshard.cli import main as cli
from fxshard.cli.doctor import State


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one, also where the tests run without."""
    monkeypatch.setattr(private, "cpp_compiler", lambda: "g++")


def test_what_is_here(compiler: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"torch               {torch.__version__}" in shown and "Everything that is needed is here." in shown
    if not torch.cuda.is_available():
        assert "experts             torch; not triton: they are on cpu" in shown
        assert "dequantize and multiply in float32" in shown and "2048 × 5632: plain, by torch.mm" in shown


def test_what_will_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(private, "cpp_compiler", lambda: None)
    assert cli.main(["doctor", "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["C++ compiler"]["state"] == State.BAD and "install g++" in findings["C++ compiler"]["detail"]


def test_a_check_that_fails_is_a_finding(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> str:
        raise RuntimeError("driver too old\nand more")

    monkeypatch.setattr("fxshard.kernels.mxfp8_products.path", broken)
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["MXFP8 products"].state is State.BAD
    assert found["MXFP8 products"].detail == "RuntimeError: driver too old"


@pytest.mark.parametrize(("found", "fine"), [("2.13.0+cpu", True), ("2.11", True), ("2.9.1", False), ("3.0", True)])
def test_versions(found: str, fine: bool) -> None:
    assert (doctor._at_least(found, "2.11")[0] is State.GOOD) == fine
