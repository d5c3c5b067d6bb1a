"""What is done in threads beside a program."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxshard.helpers import beside

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def nothing_begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(beside, "_begun", {})
    monkeypatch.setattr(beside, "_behind", [])
    yield
    beside.finish_all()


def test_each_thing_is_begun_once_and_waited_for() -> None:
    ready, done = threading.Event(), []

    def act() -> None:
        ready.wait()
        done.append(threading.current_thread())

    for name in ("one", "one", "another"):
        beside.begin(name, act)
    assert not done
    ready.set()
    beside.finish()
    assert len(done) == 2 and threading.current_thread() not in done


def test_a_failure_is_told_and_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("no such file")

    with caplog.at_level("DEBUG", logger="fxshard"):
        beside.begin("failing", fail)
        beside.behind(fail)
        beside.finish_all()
    assert caplog.text.count("ValueError: no such file") == 2


def test_what_comes_behind_is_not_waited_for_until_the_end() -> None:
    ready, done = threading.Event(), []
    beside.behind(lambda: done.append(ready.wait()))
    beside.finish()
    assert not done
    ready.set()
    beside.finish_all()
    assert done == [True]


def test_a_program_that_ends_finishes_what_comes_behind(tmp_path: Path) -> None:
    """Its next start would miss it; what was begun in advance is not wanted any more."""
    script = """
import _thread, sys, time
from pathlib import Path
from fxshard.helpers import beside

def behind():
    beside.behind(lambda: (time.sleep(0.5), Path(sys.argv[1]).touch()))
    asked.release()

asked = _thread.allocate_lock()
asked.acquire()
_thread.start_new_thread(behind, ())  # as autograd's threads are, which Python has not started
asked.acquire()
beside.begin("something long", lambda: time.sleep(60))
beside.begin("a library", lambda: (time.sleep(0.5), Path(sys.argv[2]).touch()), torch=True)
"""
    paths = [tmp_path / "written", tmp_path / "loaded"]
    subprocess.run([sys.executable, "-c", script, *map(str, paths)], check=True, timeout=20)
    assert all(path.exists() for path in paths)


def test_threads_that_cannot_be_started_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    beside.begin("one", lambda: None)
    beside.behind(lambda: None)
    beside.finish_all()
