"""Staging at run time: what is written where and when, byte by byte, in memory that gradients share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fxshard
from fxshard._torch import private
from fxshard.planner.gathered import Transfer
from fxshard.runtime.bucket import Bucket
from tests.pool import Pool
from tests.precision.test_gathers import compiled, run, trained
from tests.thorough import thorough
from tests.training import Run

Around = Callable[[Bucket, Transfer], Transfer]


def around_staging(model: fxshard.ShardedModule, around: Around) -> None:
    """Have every staged gather of the model pass through a function."""
    engine = model._sharding.engine
    make = engine._transfer

    def wrapped(bucket: Bucket, *args: Any) -> Transfer:
        transfer = make(bucket, *args)
        return around(bucket, transfer) if bucket.plan.staged else transfer

    engine._transfer = wrapped  # type: ignore[method-assign]


class Watch:
    """Fills all memory that staging may share with a pattern and compares every byte of it afterwards."""

    def __init__(self, model: fxshard.ShardedModule) -> None:
        self.engine = model._sharding.engine
        self.problems: list[str] = []
        self.order: list[str] = []
        self.staged: set[int] = set()

    def memory(self) -> list[torch.Tensor]:
        full = [bucket.grad_full for bucket in self.engine.buckets if bucket.grad_full is not None]
        return [self.engine.arena._memory, *[flat.view(torch.uint8) for flat in full]]

    def only(self, what: str, do: Callable[[], None], part: torch.Tensor, value: torch.Tensor) -> None:
        """``do`` leaves ``value`` in ``part`` and every other byte as it is."""
        expected = [flat.clone() for flat in self.memory()]
        do()
        begin, size = part.data_ptr(), part.numel() * part.itemsize
        for before, flat in zip(expected, self.memory(), strict=True):
            offset = begin - flat.data_ptr()
            if 0 <= offset < flat.numel():
                before[offset : offset + size] = value.view(torch.uint8)
            if not torch.equal(before, flat):
                self.problems.append(f"{what}: {int((before != flat).sum())} bytes differ")
        self.order.append(what)

    def __call__(self, bucket: Bucket, transfer: Transfer) -> Transfer:
        ((staging, own),) = transfer.moves
        self.staged.add(staging.data_ptr())
        stage, settle = transfer.stage, transfer.settle
        assert stage is not None and settle is not None

        def watched_stage() -> None:
            for flat in self.memory():
                flat.fill_(0xA5)
            self.only("stage", stage, own, bucket.master.to(torch.bfloat16))

        def watched_settle() -> None:
            self.only("settle", settle, staging, torch.zeros_like(staging))

        return replace(transfer, stage=watched_stage, settle=watched_settle)


def watched(zero: int) -> tuple[Run, Run, list[str], list[str], int]:
    """Plain training, training that is watched, what was wrong, what happened in order, and how often."""
    # One gather at a time: others write to memory of their own while this one is looked at.
    model = compiled(zero, "auto", prefetch=0, overlap=False)
    watch = Watch(model)
    around_staging(model, watch)
    gather = private.all_gather

    def noted(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if output.data_ptr() in watch.staged:
            watch.order.append("gather")
        return gather(output, *args, **kwargs)

    private.all_gather = noted
    try:
        on = trained(model, steps=2)
    finally:
        private.all_gather = gather
    times = 2 * sum(bucket.plan.staged for bucket in model._sharding.buckets)
    return run(zero, "off", steps=2), on, watch.problems, watch.order, times


@pytest.mark.thorough
@pytest.mark.shows("Q7", "Q5")
@pytest.mark.parametrize("zero", [thorough(1), 2])
def test_only_owned_bytes_are_staged_and_only_the_bucket_is_cleared(ranks: Pool, zero: int) -> None:
    for off, on, problems, order, times in ranks(2, watched, zero):
        assert problems == []
        assert times and order == ["stage", "gather", "settle"] * times
        assert on.same(off)


def poisoned(zero: int) -> tuple[Run, Run, bool]:
    """Training, and training with every staging buffer full of NaN as soon as it has been quantized and cleared."""
    model = compiled(zero, "auto")
    seen = False

    def around(bucket: Bucket, transfer: Transfer) -> Transfer:
        ((staging, _),) = transfer.moves
        settle = transfer.settle
        assert settle is not None

        def poison() -> None:
            nonlocal seen
            settle()
            staging.fill_(torch.nan)
            seen = True

        return replace(transfer, settle=poison)

    around_staging(model, around)
    return run(zero, "off", steps=3), trained(model, steps=3), seen


@pytest.mark.shows("Q5")
@pytest.mark.parametrize("zero", [1, thorough(2)])
def test_staged_bytes_never_appear_in_a_gradient(ranks: Pool, zero: int) -> None:
    for off, on, seen in ranks(2, poisoned, zero):
        assert seen
        assert on.same(off)
