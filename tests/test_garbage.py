"""Python's garbage collector, held back and sent past what stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from fxshard.garbage import OF_PYTHON, make_old, no_garbage_collection


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that are collected, as it happens."""
    seen: list[int] = []

    def note(phase: str, about: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(about["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen, as in most programs; the suite freezes what it has imported."""
    frozen = gc.get_freeze_count() > 0
    gc.disable()
    gc.collect()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def many() -> list[Cycle]:
    """More objects than a collector leaves alone."""
    return [Cycle() for _ in range(3 * gc.get_threshold()[0])]


def test_no_collection_inside(collections: list[int]) -> None:
    gc.enable()
    kept = many()
    assert collections
    collections.clear()
    with no_garbage_collection():
        assert not gc.isenabled()
        kept += many()
        assert not collections
    assert gc.isenabled()
    kept += many()
    assert collections


def test_it_stays_off_where_somebody_has_turned_it_off() -> None:
    gc.disable()
    with no_garbage_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_an_error_restores_it(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(ValueError, match="inside"), no_garbage_collection():
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled() == enabled


def test_the_outermost_restores_it() -> None:
    gc.enable()
    with no_garbage_collection():
        with no_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_unless_it_is_not_wanted() -> None:
    gc.enable()
    with no_garbage_collection(False):
        assert gc.isenabled()
        with no_garbage_collection():
            with no_garbage_collection(False):
                assert not gc.isenabled()
            assert not gc.isenabled()
    assert gc.isenabled()


def among(objects: list[Any], one: object) -> bool:
    return any(each is one for each in objects)


def test_what_is_old_is_not_looked_at(thawed: None, collections: list[int]) -> None:
    """Nor collected: garbage waits for a full collection."""
    kept, garbage = many(), Cycle()
    gone = weakref.ref(garbage)
    del garbage
    assert among(gc.get_objects(generation=0), kept[0]) and gc.get_count()[0] >= len(kept)
    make_old()
    assert gc.get_count()[0] < 100 and gc.get_count()[1:] == (0, 0)
    assert len(gc.get_objects(generation=0)) < 100 and not gc.get_objects(generation=1)
    assert among(gc.get_objects(generation=2), kept[0])
    assert gc.get_freeze_count() == 0
    assert not collections and gone() is not None
    gc.collect(1)
    assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_somebody_has_frozen_stays_frozen(thawed: None) -> None:
    gc.freeze()
    frozen, kept = gc.get_freeze_count(), many()
    make_old()
    assert gc.get_freeze_count() > frozen // 2 > OF_PYTHON
    assert among(gc.get_objects(generation=0), kept[0])


@pytest.mark.parametrize(("count", "old"), [(OF_PYTHON, True), (OF_PYTHON + 1, False)])
def test_what_the_interpreter_itself_has_frozen_does_not_count(
    thawed: None, monkeypatch: pytest.MonkeyPatch, count: int, old: bool
) -> None:
    kept = many()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count)
    make_old()
    assert among(gc.get_objects(generation=0), kept[0]) != old
