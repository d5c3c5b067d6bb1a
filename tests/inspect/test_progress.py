"""Progress on a terminal, and silence elsewhere."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fxshard
from fxshard._torch import progress as shown
from fxshard._torch.progress import long_work, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def eager_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any work is long."""
    monkeypatch.setattr(shown, "PATIENCE", 0.0)
    monkeypatch.delenv(shown.VARIABLE, raising=False)
    monkeypatch.setenv("TERM", "xterm")


pytestmark = pytest.mark.usefixtures("eager_to_tell")


def on_a_terminal(run: Callable[[], None]) -> str:
    """What is seen where stderr is one."""
    with contextlib.redirect_stderr(Terminal()) as screen:
        run()
    return screen.getvalue()


def work() -> None:
    with long_work("compiling forward") as report:
        report(3, 4)


def test_a_line_that_leaves_nothing_behind() -> None:
    first, second, rest = on_a_terminal(work).split("\r\x1b[2K")
    assert (first, rest) == ("", "")
    assert "━" * 18 + "╌" * 6 in second and " 75% " in second and second.endswith("compiling forward")


def test_short_work_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "PATIENCE", 60.0)
    assert on_a_terminal(work) == ""


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), (shown.VARIABLE, "0")])
def test_other_ranks_and_who_asks_for_it_see_nothing(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert on_a_terminal(work) == ""


def command() -> None:
    with progress(1) as begin:
        begin("one thing")
        print("a figure")
        work()


def test_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    work()
    command()
    assert capsys.readouterr() == ("a figure\n", "")


def test_a_benchmark_writes_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("1", "0"):
        monkeypatch.setenv(shown.VARIABLE, value)
        with progress(2, lines=True) as begin:
            begin(f"compiling {value}")
    out, err = capsys.readouterr()
    assert out == "" and err.endswith(" s  compiling 1\n") and err.count("\n") == 1


def test_stdout_in_a_file_stays_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed below a command's bar does not go to the terminal with it. Nor is there a second bar."""
    screen = on_a_terminal(command)
    assert capsys.readouterr().out == "a figure\n"
    assert "one thing" in screen and "compiling" not in screen


def test_compiling_saving_and_loading(tmp_path: Path) -> None:
    def train() -> None:
        model = fxshard.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lowering="eager")
        model(torch.ones(2, 4)).sum().backward()
        fxshard.save(model, tmp_path / "step-1")
        fxshard.load(model, tmp_path)

    screen = on_a_terminal(train)
    for what in ("compiling forward", "compiling backward", "saving step-1", "loading step-1"):
        assert what in screen
