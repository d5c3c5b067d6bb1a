"""What a rank holds: at rest, while it runs, and after the original model was taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxshard
from fxshard import _compat
from fxshard.events import Kind, Phase
from tests.measuring import NewBytes
from tests.pool import Pool
from tests.training import llama, this_ranks_batch


def bytes_by_stage() -> dict[int, dict[str, int]]:
    found = {}
    for zero in range(4):
        new = NewBytes()
        model = fxshard.compile(llama(), zero=zero, optimizer=fxshard.AdamW(), lowering="eager")
        model(*this_ranks_batch(0)).backward()
        model.optimizer.step()
        found[zero] = {"total": new.count() - model._sharding.engine.arena.bytes, **model.bytes_at_rest()}
        del model
    return found


def arena_addresses() -> tuple[list[int], int, int]:
    model = fxshard.compile(llama(), zero=3, optimizer=fxshard.AdamW(), lowering="eager")
    allocations = []
    for step in range(3):
        model(*this_ranks_batch(step)).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        allocations.append(model._sharding.engine.arena.allocations)
    engine = model._sharding.engine
    return allocations, engine.arena.bytes, model.schedule.arena_bytes


def gather_buffers() -> list[tuple[bool, bool]]:
    """For every gather: is each parameter a view of the gathered buffer, and is the buffer in the arena?"""
    model = fxshard.compile(llama(), zero=3, lowering="eager")
    engine = model._sharding.engine
    seen: list[tuple[bool, bool]] = []
    wait = engine.wait

    def watched(*args: Any) -> Any:
        views = wait(*args)
        ((flat, _),) = engine._gathered[args[0]].transfer.moves
        arena = engine.arena._memory.untyped_storage().data_ptr()
        seen.append(
            (
                all(view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for view in views),
                flat.untyped_storage().data_ptr() == arena,
            )
        )
        return views

    engine.wait = watched  # type: ignore[method-assign]
    model(*this_ranks_batch(0)).backward()
    return seen


def reductions() -> list[bool]:
    """For every reduce-scatter: does its output share memory with its input?"""
    overlaps = []
    original = _compat.reduce_scatter

    def watched(output: torch.Tensor, full: torch.Tensor, *args: object, **kwargs: object) -> object:
        begin, end = full.data_ptr(), full.data_ptr() + full.nbytes
        overlaps.append(output.data_ptr() < end and begin < output.data_ptr() + output.nbytes)
        return original(output, full, *args, **kwargs)  # type: ignore[arg-type]

    _compat.reduce_scatter = watched  # type: ignore[assignment]
    try:
        for zero in (1, 2, 3):
            model = fxshard.compile(llama(), zero=zero, lowering="eager")
            model(*this_ranks_batch(0)).backward()
            model(*this_ranks_batch(1)).backward()  # and again with gradients to add to
    finally:
        _compat.reduce_scatter = original
    return overlaps


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
def test_bytes_at_rest_match_the_table_of_the_stage(ranks: Pool) -> None:
    """N parameters of four bytes over two ranks: full is 4N, a shard 2N; padding stays under two per cent."""
    full = sum(p.numel() * 4 for p in llama().parameters())
    table = {
        0: {"param": full, "grad": full, "state": 2 * full},
        1: {"param": full, "grad": full + full // 2, "state": full},
        2: {"param": full, "grad": full // 2, "state": full},
        3: {"param": full // 2, "grad": full // 2, "state": full},
    }
    for found in ranks(2, bytes_by_stage):
        for zero, expected in table.items():
            for what, size in expected.items():
                assert size <= found[zero][what] <= size * 1.02, f"ZeRO-{zero} {what}"
            total = sum(expected.values())
            assert total <= found[zero]["total"] <= total * 1.04, f"ZeRO-{zero}: something else is held"


def test_steps_allocate_the_arena_once(ranks: Pool) -> None:
    for allocations, held, planned in ranks(2, arena_addresses):
        assert allocations == [1, 1, 1]
        assert held == planned > 0


@pytest.mark.shows("L11")
def test_parameters_are_views_of_the_gathered_buffer(ranks: Pool) -> None:
    for seen in ranks(2, gather_buffers):
        assert seen and all(views and in_arena for views, in_arena in seen)


@pytest.mark.shows("S6")
def test_reduce_scatter_never_writes_where_it_reads(ranks: Pool) -> None:
    for overlaps in ranks(2, reductions):
        assert len(overlaps) == 3 * 2 * 5
        assert not any(overlaps)


@pytest.mark.shows("S14")
def test_the_original_storage_is_freed(ranks: Pool) -> None:
    for size, hollow, held in ranks(2, freed):
        assert hollow == 0
        assert held <= size * 0.52


def gradient_buckets_alive() -> tuple[int, int, list[str], list[str]]:
    model = fxshard.compile(llama(), zero=3, lowering="eager")
    engine = model._sharding.engine
    most = 0
    grad = engine.gradients.grad

    def watched(*args: Any) -> Any:
        nonlocal most
        views = grad(*args)
        most = max(most, engine.gradients.alive)
        return views

    engine.gradients.grad = watched  # type: ignore[method-assign]
    model(*this_ranks_batch(0)).backward()
    reduced = [e.bucket for e in model.schedule.events if e.kind is Kind.REDUCE]
    gathered = [e.bucket for e in model.schedule.events if e.kind is Kind.UNSHARD and e.phase is Phase.FORWARD]
    return most, engine.gradients.alive, reduced, gathered


@pytest.mark.shows("S5", "L6")
def test_at_most_two_gradient_buckets_live_and_none_at_the_end(ranks: Pool) -> None:
    for most, left, reduced, gathered in ranks(2, gradient_buckets_alive):
        assert most == 2 and left == 0
        assert reduced == gathered[::-1]  # backward finishes what forward used last, first
