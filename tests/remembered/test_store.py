"""Files beside Inductor's cache."""

from __future__ import annotations

import os
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
