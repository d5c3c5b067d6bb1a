"""ZeRO 0–3 compute what one process computes, whatever is turned on or off."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fxshard
from tests.pool import Pool
from tests.stack import Stack, batch, deep
from tests.thorough import thorough
from tests.training import Make, Run, fsdp2_run, llama, plain_run, sharded_run

ALL = (0, 1, 2, 3)


def stages(make: Make, zeros: tuple[int, ...]) -> tuple[dict[int, Run], Run]:
    """Stages of ZeRO, and FSDP2."""
    return {zero: sharded_run(make, zero=zero) for zero in zeros}, fsdp2_run(make)


def variants(zero: int, budget: int) -> dict[str, Run]:
    return {
        "default": sharded_run(deep, zero=zero, steps=2),
        "no prefetch, no arena": sharded_run(deep, zero=zero, steps=2, prefetch=0, arena=False),
        "deep prefetch": sharded_run(deep, zero=zero, steps=2, prefetch=3),
        "no overlap": sharded_run(deep, zero=zero, steps=2, overlap=False),
        "nothing kept": sharded_run(deep, zero=zero, steps=2, keep_resident=False),
        "as little memory as possible": sharded_run(deep, zero=zero, steps=2, memory_budget=budget),
    }


def inductor_and_eager(make: Make) -> tuple[Run, Run]:
    options: dict[str, Any] = {"zero": 3, "steps": 2, "units": ["layers.*"]}
    return sharded_run(make, lowering="inductor", **options), sharded_run(make, **options)


def shallow() -> nn.Module:
    """One layer and the head: little for a C++ compiler."""
    model = Stack()
    model.layers = model.layers[:1]
    return model


def single() -> nn.Module:
    return llama(layers=1)


def short() -> nn.Module:
    return llama(layers=2)


def tied() -> nn.Module:
    return llama(tied=True, layers=1)


def tied_run() -> Run:
    return sharded_run(tied, zero=3, units=["layers.*"])


@pytest.mark.shows("S2")
@pytest.mark.parametrize(
    ("world", "make", "zeros"),
    [
        (2, Stack, ALL),
        (3, Stack, (2,)),
        *(thorough(world, make, ALL) for world, make in ((2, single), (2, short), (3, Stack), (4, Stack))),
    ],
)
def test_stages_equal_one_process_on_the_global_batch(
    ranks: Pool, world: int, make: Make, zeros: tuple[int, ...]
) -> None:
    """With two ranks a sum has one order, so all-reduce and reduce-scatter must give the same bits there.

    And those of FSDP2.
    """
    reference = plain_run(world, make)
    for runs, peer in ranks(world, stages, make, zeros):
        for zero, run in runs.items():
            assert run.distance(reference) < 1e-6, f"ZeRO-{zero}"
            assert run.losses == pytest.approx(reference.losses, rel=1e-6)
            assert run.distance(peer) < 1e-6, f"ZeRO-{zero} is not FSDP2"
            assert world > 2 or run.same(peer), f"ZeRO-{zero} is not bitwise FSDP2"


@pytest.mark.shows("S3")
@pytest.mark.parametrize("zero", [thorough(1), 3])
def test_scheduling_options_change_nothing(ranks: Pool, zero: int) -> None:
    with pytest.raises(fxshard.BudgetError) as caught:
        options: dict[str, Any] = {"zero": zero, "optimizer": fxshard.AdamW(), "hardware": "cpu", "lowering": "eager"}
        fxshard.plan(deep(), batch(0, 0), world_size=2, memory_budget=1, **options)
    for runs in ranks(2, variants, zero, caught.value.smallest):
        for name, run in runs.items():
            assert run.same(runs["default"]), name


@pytest.mark.parametrize("make", [shallow, thorough(Stack), thorough(single)])
def test_inductor_segments_equal_eager_ones(ranks: Pool, make: Make) -> None:
    for lowered, eager in ranks(2, inductor_and_eager, make, timeout=350):
        assert lowered.distance(eager) < 1e-5


@pytest.mark.shows("L5")
def test_tied_embedding_is_stored_and_updated_once(ranks: Pool) -> None:
    reference = plain_run(2, tied)
    for run in ranks(2, tied_run):
        assert run.distance(reference) < 1e-6
        assert set(run.params) == set(reference.params)  # both names are in the state dict
        assert "head.weight" not in run.grads  # but there is one gradient
