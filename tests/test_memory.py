"""What a rank holds: at rest, while it runs, and after the original model was taken apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fxshard
from fxshard._torch import private
from fxshard.planner.buckets import plan_buckets
from fxshard.planner.units import find_units
from fxshard.schedule.events import Kind, Phase
from tests.measuring import NewBytes
from tests.pool import Pool
from tests.stack import wide, wide_batch
from tests.training import llama, this_ranks_batch, train_step


@dataclass
class Stage:
    """What one ZeRO stage holds at rest, and for every reduce-scatter: does its output share memory with its input?"""

    held: dict[str, int]
    overlaps: list[bool]


def by_stage() -> dict[int, Stage]:
    found = {}
    original = private.reduce_scatter

    def observed(output: torch.Tensor, full: torch.Tensor, *args: object, **kwargs: object) -> object:
        begin, end = full.data_ptr(), full.data_ptr() + full.nbytes
        overlaps.append(output.data_ptr() < end and begin < output.data_ptr() + output.nbytes)
        return original(output, full, *args, **kwargs)  # type: ignore[arg-type]

    with mock.patch.object(private, "reduce_scatter", observed):
        for zero in range(4):
            overlaps: list[bool] = []
            new = NewBytes()
            model = fxshard.compile(wide(), zero=zero, optimizer=fxshard.AdamW(), lowering="eager")
            model(*wide_batch(0, dist.get_rank())).backward()
            model.optimizer.step()
            held = {"total": new.count() - model._sharding.engine.arena.bytes, **model.bytes_at_rest()}
            model(*wide_batch(0, dist.get_rank())).backward()  # and again with gradients to add to
            found[zero] = Stage(held, overlaps)
            del model
    return found


@pytest.fixture(scope="module")
def stages(ranks: Pool) -> list[dict[int, Stage]]:
    return ranks(2, by_stage)


@dataclass
class Watched:
    """What one model did in three steps under ZeRO-3."""

    addresses: set[int]
    """Of the arena, after each step."""
    arena: tuple[int, int]
    """Bytes held and planned."""
    gathers: list[tuple[bool, bool]]
    """For every gather: is each parameter a view of the gathered buffer, and is the buffer in the arena?"""
    gradients: tuple[int, int]
    """Gradient buckets alive at most, and at the end."""
    reduced: list[str]
    gathered: list[str]


def watched() -> Watched:
    model = fxshard.compile(llama(layers=2), zero=3, optimizer=fxshard.AdamW(), lowering="eager")
    engine = model._sharding.engine
    addresses: set[int] = set()
    gathers: list[tuple[bool, bool]] = []
    most = 0
    wait, grad = engine.wait, engine.gradients.grad

    def waited(*args: Any) -> Any:
        views = wait(*args)
        ((flat, _),) = engine._gathered[args[0]].transfer.moves
        arena = engine.arena._memory.untyped_storage().data_ptr()
        gathers.append(
            (
                all(view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for view in views),
                flat.untyped_storage().data_ptr() == arena,
            )
        )
        return views

    def taken(*args: Any) -> Any:
        nonlocal most
        views = grad(*args)
        most = max(most, engine.gradients.alive)
        return views

    engine.wait = waited  # type: ignore[method-assign]
    engine.gradients.grad = taken  # type: ignore[method-assign]
    for step in range(3):
        train_step(model, *this_ranks_batch(step))
        addresses.add(engine.arena.address)
    reduced = [e.bucket for e in model.schedule.events if e.kind is Kind.REDUCE]
    used = [e.bucket for e in model.schedule.events if e.kind is Kind.WAIT and e.phase is Phase.FORWARD]
    arena = (engine.arena.bytes, model.schedule.arena_bytes)
    return Watched(addresses, arena, gathers, (most, engine.gradients.alive), reduced, used)


@pytest.fixture(scope="module")
def seen(ranks: Pool) -> list[Watched]:
    return ranks(2, watched)


def freed() -> tuple[int, int, int]:
    new = NewBytes()
    plain = llama()
    size = sum(p.numel() * 4 for p in plain.parameters())
    model = fxshard.compile(plain, zero=3, lowering="eager")
    hollow = sum(p.untyped_storage().nbytes() for p in plain.parameters())
    held = new.count()
    del model
    return size, hollow, held


@pytest.mark.shows("S1")
def test_bytes_at_rest_match_the_table_of_the_stage(stages: list[dict[int, Stage]]) -> None:
    """N parameters of four bytes over two ranks: full is 4N, a shard 2N; padding, and what one rank has more
    rows of than the other, stay under two per cent."""
    full = sum(p.numel() * 4 for p in wide().parameters())
    table = {
        0: {"param": full, "grad": full, "state": 2 * full},
        1: {"param": full, "grad": full + full // 2, "state": full},
        2: {"param": full, "grad": full // 2, "state": full},
        3: {"param": full // 2, "grad": full // 2, "state": full},
    }
    for found in stages:
        for zero, expected in table.items():
            held = found[zero].held
            for what, size in expected.items():
                assert held[what] == pytest.approx(size, rel=0.02), f"ZeRO-{zero} {what}"
            total = sum(expected.values())
            assert total <= held["total"] <= total * 1.04, f"ZeRO-{zero}: something else is held"


def test_steps_allocate_the_arena_once(seen: list[Watched]) -> None:
    for found in seen:
        assert len(found.addresses) == 1
        assert found.arena[0] == found.arena[1] > 0


@pytest.mark.shows("L11")
def test_parameters_are_views_of_the_gathered_buffer(seen: list[Watched]) -> None:
    for found in seen:
        assert found.gathers and all(views and in_arena for views, in_arena in found.gathers)


@pytest.mark.shows("S6")
def test_reduce_scatter_never_writes_where_it_reads(stages: list[dict[int, Stage]]) -> None:
    buckets = len(plan_buckets(wide(), find_units(wide()), zero=3, ranks=2))
    for found in stages:
        for zero in (1, 2, 3):
            assert found[zero].overlaps == [False] * 2 * buckets


@pytest.mark.shows("S14")
def test_the_original_storage_is_freed(ranks: Pool) -> None:
    for size, hollow, held in ranks(2, freed):
        assert hollow == 0
        assert held <= size * 0.52


@pytest.mark.shows("S5", "L6")
def test_at_most_two_gradient_buckets_live_and_none_at_the_end(seen: list[Watched]) -> None:
    for found in seen:
        assert found.gradients == (2, 0)
        embedding, layer, *later = found.gathered
        # Backward finishes what forward used last, first; defer_wgrad leaves the first layer for the end.
        assert found.reduced == [*reversed(later), embedding, layer]
