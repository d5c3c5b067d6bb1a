"""Files beside Inductor's cache."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fxshard.remembered import store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "fxshard"


def test_what_is_written_is_read(cache: Path) -> None:
    assert store.read("a") is None
    store.write("a", b"one")
    store.write("a", b"two")
    assert store.read("a") == b"two" and store.read("b") is None
    assert [path.name for path in cache.iterdir()] == ["a.graphs"]  # and nothing is left half-written
    store.remove("a")
    store.remove("a")
    assert store.read("a") is None


def test_what_was_used_last_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST", 3)
    (cache).mkdir()
    (cache / "other").touch()
    for i, name in enumerate("abc"):
        store.write(name, b"")
        os.utime(cache / f"{name}.graphs", (i, i))
    store.read("a")
    store.write("d", b"")
    assert sorted(path.name for path in cache.iterdir()) == ["a.graphs", "c.graphs", "d.graphs", "other"]


def test_a_full_disk_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        store.write("a", b"one")
    assert not list(cache.iterdir())


def test_marks_are_kept_and_bounded_apart(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_MARKS", 2)
    store.write("a", b"graphs")
    os.utime(cache / "a.graphs", (0, 0))
    for i, name in enumerate("bcd"):
        assert not store.is_marked(name)
        store.mark(name)
        store.mark(name)
        os.utime(cache / f"{name}.done", (i, i))
    assert [name for name in "abcd" if store.is_marked(name)] == ["c", "d"]
    assert store.read("a") == b"graphs"


def test_a_cache_that_cannot_be_written_is_not_marked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(Path, "touch", denied)
    store.mark("a")
    assert not store.is_marked("a")


def test_what_a_killed_process_left_half_written_goes(cache: Path) -> None:
    store.write("a", b"")
    for name, age in (("old", 7200), ("new", 60)):
        path = cache / f"{name}.1.2.unfinished"
        path.touch()
        os.utime(path, (time.time() - age, time.time() - age))
    store.write("b", b"")
    assert sorted(path.name for path in cache.iterdir()) == ["a.graphs", "b.graphs", "new.1.2.unfinished"]
