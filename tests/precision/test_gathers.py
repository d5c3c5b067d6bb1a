"""Gathering quantized parameters changes nothing, bitwise, moves as little as promised, and quantizes once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fxshard
from fxshard.planner.gather_modes import Gather
from fxshard.runtime.bucket import Bucket
from fxshard.schedule.events import Kind, Phase
from tests.pool import Pool
from tests.precision.nets import net, single, this_ranks_tokens
from tests.precision.traffic import Bytes, gathered
from tests.thorough import thorough
from tests.training import EPS, Run, full_gradients, mean_over_ranks, with_debug

BF16 = torch.bfloat16
AHEAD = 4
"""So many gathers at the start of forward include quantized ones: the optimizer step before starts them."""


def compiled(zero: int, gather: str, make: Any = single, **options: Any) -> fxshard.ShardedModule:
    optimizer = options.pop("optimizer", fxshard.AdamW(lr=1e-2, eps=EPS))
    options = {"precision": fxshard.MXFP8(gather=gather), "units": ["layers.*"], **options}
    return fxshard.compile(make(), zero=zero, optimizer=optimizer, lowering="eager", **with_debug(options))


def run(zero: int, gather: str, *, steps: int = 5, disturbed: bool = False, **options: Any) -> Run:
    """Train; disturbed: evaluate, clear gradients to zeros and load a state dict at every turn."""
    return trained(compiled(zero, gather, **options), steps=steps, disturbed=disturbed)


def trained(model: fxshard.ShardedModule, *, steps: int, disturbed: bool = False) -> Run:
    losses, grads = [], {}
    for step in range(steps):
        x, y = this_ranks_tokens(step)
        loss = model(x, y)
        loss.backward()
        losses.append(mean_over_ranks(loss))
        grads = full_gradients(model)
        model.optimizer.step()
        model.optimizer.zero_grad(set_to_none=not disturbed)
        if disturbed:
            with torch.no_grad():
                losses.append(mean_over_ranks(model(x, y)))
            model.load_state_dict(model.full_state_dict())
    return Run(losses, grads, model.full_state_dict())


def on_and_off(zero: int) -> dict[str, Run]:
    runs = {"off": run(zero, "off"), "on": run(zero, "auto")}
    if zero == 1:
        runs["no overlap"] = run(zero, "auto", overlap=False)
    if zero == 2:
        runs["no arena"] = run(zero, "auto", arena=False)
        runs["whole"] = run(zero, "auto", layout="whole")
    if zero == 3:
        runs["ahead, whole, no overlap"] = run(zero, "auto", prefetch=AHEAD, layout="whole", overlap=False)
    return runs


def disturbed(zero: int) -> tuple[Run, Run]:
    ahead = {"prefetch": AHEAD} if zero == 3 else {}
    return run(zero, "off", disturbed=True, steps=3), run(zero, "auto", disturbed=True, steps=3, **ahead)


@pytest.mark.thorough
@pytest.mark.shows("Q4")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gathering_quantized_parameters_changes_nothing(ranks: Pool, zero: int) -> None:
    for runs in ranks(2, on_and_off, zero):
        for name, one in runs.items():
            assert one.same(runs["off"]), name
        assert len(set(runs["off"].losses)) == 5  # weights change in every step


def with_muon(zero: int) -> tuple[Run, Run, list[Counter[str]], set[bool]]:
    """Both runs, how often each bucket is gathered in each phase, and whether buckets have matrices for Muon."""
    muon = fxshard.Muon(lr=1e-2, adamw=fxshard.AdamW(lr=1e-2, eps=EPS))
    off, model = run(zero, "off", steps=3, optimizer=muon), compiled(zero, "auto", optimizer=muon)
    on = trained(model, steps=3)
    phases = (Phase.FORWARD, Phase.OPTIMIZER), (Phase.BACKWARD,)
    gathers = [event for _, event in model.schedule.of(Kind.UNSHARD)]
    counts = [Counter(event.bucket for event in gathers if event.phase in some) for some in phases]
    return off, on, counts, {bool(bucket.matrices) for bucket in model.schedule.buckets}


@pytest.mark.shows("Q8")
@pytest.mark.parametrize("zero", [thorough(2), 3])
def test_muon_and_adamw_buckets_are_each_gathered_once(ranks: Pool, zero: int) -> None:
    for off, on, counts, kinds in ranks(2, with_muon, zero):
        assert on.same(off)
        assert len(set(on.losses)) == 3
        assert kinds == {True, False}
        assert all(times == 1 for count in counts for times in count.values())


def with_kept_gradients() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of two micro-batches, the first inside no_sync, with a forced gather in between."""
    found = []
    for gather in ("off", "auto"):
        model = compiled(1, gather)
        with model.no_sync():
            model(*this_ranks_tokens(0)).backward()
        model.load_state_dict(model.full_state_dict())  # the shard changed: the next forward gathers, and stages, again
        model(*this_ranks_tokens(1)).backward()
        found.append(list(full_gradients(model).values()))
    return found[0], found[1]


@pytest.mark.shows("Q5")
def test_staging_leaves_gradients_that_no_sync_kept_alone(ranks: Pool) -> None:
    for off, on in ranks(2, with_kept_gradients):
        assert all(map(torch.equal, off, on))


@pytest.mark.shows("Q4", "Q6")
@pytest.mark.parametrize("zero", [thorough(1), thorough(2), 3])
def test_evaluation_zero_grad_and_loading_in_between(ranks: Pool, zero: int) -> None:
    for off, on in ranks(2, disturbed, zero):
        assert on.same(off)
        assert len(set(on.losses)) == len(on.losses)


def recomputed() -> tuple[Run, Run, set[str]]:
    """Runs whose blocks are recomputed in backward, and what backward gathers for that."""

    def checkpointed() -> torch.nn.Module:
        return net(checkpointed=True, layers=1)

    off, model = run(3, "off", steps=3, make=checkpointed), compiled(3, "auto", make=checkpointed)
    on = trained(model, steps=3)
    gathers = model.schedule.of(Kind.UNSHARD, phase=Phase.BACKWARD)
    return off, on, {event.copies.value for _, event in gathers if event.copies}


@pytest.mark.thorough
def test_recomputation_in_backward_gathers_both_copies(ranks: Pool) -> None:
    for off, on, brought in ranks(2, recomputed):
        assert on.same(off)
        assert "both" in brought


def moved(precision: fxshard.Precision) -> tuple[Bytes, ...]:
    model = compiled(3, "auto", precision=precision, keep_resident=False)
    return gathered(model, this_ranks_tokens(0), ("up.weight", "down.weight"))


def traffic() -> tuple[Any, Any]:
    plain = fxshard.Precision(param=BF16, reduce=torch.float32)
    return moved(plain), moved(fxshard.MXFP8())


@pytest.mark.shows("Q9", "Q11")
def test_direct_gathers_move_half_the_bytes(ranks: Pool) -> None:
    for (_, _, plain), (planned, wire, quantized) in ranks(2, traffic):
        assert planned == wire
        for phase in ("forward", "backward"):
            assert quantized[phase] <= 0.53 * plain[phase]


@dataclass
class Stage:
    """What one model under ZeRO 0–3 holds, and how often it quantizes."""

    exact: bool
    """Whether masters start from the model's own values."""
    measured: dict[str, int]
    planned: dict[str, int]
    forms: set[str]
    """What parameters rest in."""
    shared: list[bool]
    """For every staging buffer: does it lie in memory that gradients use?"""
    quantized: list[tuple[int, int]]
    """(steps so far, times each bucket's copies were made) before each update: micro-batches, in ZeRO-3 evaluation."""


def stage(zero: int) -> Stage:
    plain = single().state_dict()
    model = compiled(zero, "auto", **({"prefetch": AHEAD} if zero == 3 else {}))
    buckets = model._sharding.buckets
    exact = all(torch.equal(value, plain[name]) for name, value in model.full_state_dict().items())
    model(*this_ranks_tokens(0)).backward()
    measured = {what: size for what, size in model.bytes_at_rest().items() if what != "state"}
    plans = [plan.at_rest() for plan in model._sharding.plans]
    forms = {
        str(tensor.dtype)
        for bucket in buckets
        if bucket.plan.quantized
        for tensor in (bucket.full, *([bucket.copies.memory] if bucket.copies else []))
        if tensor is not None
    }
    shared = [shares(model, bucket) for bucket in buckets if bucket.plan.gather is Gather.STAGED]
    counts = []
    for step in range(3):
        for _ in range(2):
            model(*this_ranks_tokens(step)).backward()
        if zero == 3:
            with torch.no_grad():
                model(*this_ranks_tokens(step))
        counts.append((step + 1, *{bucket.copies.quantized for bucket in buckets if bucket.copies is not None}))
        model.optimizer.step()
        model.optimizer.zero_grad()
    planned = {"param": sum(p.param for p in plans), "grad": sum(p.grad for p in plans)}
    return Stage(exact, measured, planned, forms, shared, counts)


def shares(model: fxshard.ShardedModule, bucket: Bucket) -> bool:
    if bucket.grad_full is not None:  # ZeRO-1
        return bucket.staging().data_ptr() == bucket.grad_full.data_ptr()
    taken = [event.slot for _, event in model.schedule.of(Kind.GRAD) if event.slot is not None]
    staged = [
        event.slot
        for _, event in model.schedule.of(Kind.UNSHARD, phase=Phase.FORWARD)
        if event.bucket_index == bucket.plan.index and event.slot is not None
    ]
    return bool(staged) and all(any(a.offset < b.end and b.offset < a.end for b in taken) for a in staged)


def every_stage() -> list[Stage]:
    return [stage(zero) for zero in range(4)]


@pytest.fixture(scope="module")
def by_rank(ranks: Pool) -> list[list[Stage]]:
    return ranks(2, every_stage)


@pytest.mark.shows("Q2")
def test_masters_start_from_the_initial_values_and_parameters_rest_quantized(by_rank: list[list[Stage]]) -> None:
    for stages in by_rank:
        for found in stages:
            assert found.exact
            assert found.measured == found.planned
            assert found.forms == {"torch.uint8"}


@pytest.mark.shows("Q3")
def test_quantized_once_per_step(by_rank: list[list[Stage]]) -> None:
    for _, *stages in by_rank:
        assert [found.quantized for found in stages] == [[(1, 1), (2, 2), (3, 3)]] * 3


@pytest.mark.shows("Q5")
def test_staging_shares_memory_with_gradients(by_rank: list[list[Stage]]) -> None:
    for _, one, two, _ in by_rank:
        for found in (one, two):
            assert found.shared and all(found.shared)
