"""Planning under any memory budget and for any machine: what fits, and what is hidden."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxshard
from fxshard.bench.captured import Captured, capture
from fxshard.planner.hardware import PRESETS, Hardware
from fxshard.schedule.events import Kind, Phase
from fxshard.schedule.schedule import Schedule
from tests.thorough import thorough
from tests.toy import Llama, Mlp, batch
from tests.training import VOCAB, with_debug

MODELS = ("tied", "mlp", "wide")
MACHINES = ("h100", "h200", "gb200")


@cache
def captured(name: str, zero: int = 3) -> Captured:
    """Capturing takes seconds, scheduling milliseconds: capture each model once."""
    torch.manual_seed(0)
    if name == "mlp":
        return capture(Mlp(7, 130, 50, 300, 5), (torch.ones(4, 7), torch.ones(4, 5)), zero=zero, lowering="eager")
    if name == "wide":  # large enough for bandwidth to matter
        with torch.device("meta"):
            model = Llama(vocab=4096, dim=1024, layers=2, heads=8, hidden=2816)
        return capture(model, batch(0, 1, 0, 4096, size=2, length=512), zero=zero, lowering="eager")
    tied = name == "tied"
    layers = {"tied": 2, "layer norms": 1}.get(name, 3)
    model = Llama(vocab=VOCAB, dim=32, layers=layers, heads=4, hidden=88, tied=tied)
    if name == "layer norms":  # what they save is cheap to compute again
        model.norm = nn.LayerNorm(32)
        for layer in model.layers:
            layer.norm1, layer.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
    return capture(model, batch(0, 2, 0, VOCAB), zero=zero, lowering="eager")


# -- P4: memory --------------------------------------------------------------------------------------------------------


def under(
    name: str, budget: int | None, *, ranks: int = 4, machine: str | Hardware = "h200", **options: Any
) -> Schedule:
    schedule = captured(name).schedule(ranks=ranks, hardware=machine, memory_budget=budget, **with_debug(options))
    schedule.verify()
    return schedule


@cache
def smallest(name: str, ranks: int, prefetch: int | None) -> int:
    with pytest.raises(fxshard.BudgetError) as caught:
        under(name, 1, ranks=ranks, prefetch=prefetch)
    return caught.value.smallest


@pytest.mark.shows("P4")
@settings(max_examples=5)
@given(
    name=st.sampled_from(["tied", "mlp"]),
    case=st.sampled_from([(3, 1), (64, None)]),
    machine=st.sampled_from(sorted(PRESETS)),
    share=st.floats(0.3, 3.0),
)
def test_peak_stays_under_any_feasible_budget(
    name: str, case: tuple[int, int | None], machine: str, share: float
) -> None:
    ranks, prefetch = case
    least = smallest(name, ranks, prefetch)
    budget = int(least * share)
    if budget < least:
        with pytest.raises(fxshard.BudgetError) as caught:
            under(name, budget, ranks=ranks, machine=machine, prefetch=prefetch)
        assert caught.value.smallest == least
    else:
        schedule = under(name, budget, ranks=ranks, machine=machine, prefetch=prefetch)
        assert schedule.peak_bytes <= budget == schedule.budget


@pytest.mark.shows("P4")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [thorough("tied", 3), ("mlp", 2), thorough("wide", 64), *(thorough(name, 5) for name in MODELS)],
)
def test_the_smallest_budget_is_feasible_and_one_byte_less_is_not(name: str, ranks: int) -> None:
    least = smallest(name, ranks, None)
    assert under(name, least, ranks=ranks).peak_bytes == least
    with pytest.raises(fxshard.BudgetError, match=f"at least {least} bytes"):
        under(name, least - 1, ranks=ranks)


@pytest.mark.shows("P4")
@pytest.mark.parametrize("name", ["tied", "mlp"])
def test_no_budget_is_exceeded_by_looking_ahead(name: str) -> None:
    """What is kept uses a budget up, so that no order but the one it was found with may fit."""
    least = smallest(name, 64, None)
    for share in (0, 1, 6):
        budget = least + least * share // 6
        assert under(name, budget, ranks=64, machine="h100").peak_bytes <= budget


def test_more_memory_saves_communication() -> None:
    """On a machine whose network is slow: there it is worth it."""
    slow = replace(PRESETS["h200"], name="slow", intra_bandwidth=1e8)
    tight, loose = (under("tied", smallest("tied", 4, None) * factor, machine=slow) for factor in (1, 10))
    assert loose.comm_bytes < tight.comm_bytes
    assert loose.peak_bytes > tight.peak_bytes


# -- P6: time ----------------------------------------------------------------------------------------------------------


ROOMY = 10**12


def no_worse(name: str, ranks: int, machine: Hardware) -> None:
    """With any optimizer and with our own, whose step gathers for the next; without a budget and with a large one."""
    for own in (None, fxshard.AdamW()):
        rules: dict[str, dict[str, Any]] = {
            "ours": {"optimizer": own},
            "roomy": {"optimizer": own, "memory_budget": ROOMY},
            "one ahead": {"optimizer": own, "prefetch": 1},
            "FSDP2": {"fsdp2": True},
        }
        exposed = {
            rule: captured(name)
            .schedule(ranks=ranks, hardware=machine, **with_debug(options))
            .simulate(machine)
            .exposed_seconds
            for rule, options in rules.items()
        }
        least = min(exposed["one ahead"], exposed["FSDP2"])
        assert max(exposed["ours"], exposed["roomy"]) <= least * (1 + 1e-9), (own, exposed)


@pytest.mark.parametrize("budget", [None, ROOMY])
def test_a_captured_step_is_scheduled_as_plan_does_it(budget: int | None) -> None:
    """Captured once and condensed, events, places and times are those of ``fxshard.plan``."""
    ours = captured("mlp").schedule(ranks=64, hardware="h100", optimizer=fxshard.AdamW(), memory_budget=budget)
    model = Mlp(7, 130, 50, 300, 5)
    planned = fxshard.plan(
        model,
        (torch.ones(4, 7), torch.ones(4, 5)),
        world_size=64,
        hardware="h100",
        optimizer=fxshard.AdamW(),
        memory_budget=budget,
        lowering="eager",
    )
    assert ours.communication() == planned.communication()
    assert [event.slot for event in ours.events] == [event.slot for event in planned.events]
    assert ours.simulate("h100").step_seconds == pytest.approx(planned.simulate("h100").step_seconds, rel=1e-12)


FIRST = [("tied", "h100", 8), ("mlp", "h200", 64), ("wide", "gb200", 1024)]


@pytest.mark.shows("P6")
@pytest.mark.parametrize(
    ("name", "machine", "ranks"),
    [*FIRST, *(thorough(*case) for case in product(MODELS, MACHINES, (8, 64, 1024)) if case not in FIRST)],
)
def test_never_worse_than_one_ahead(name: str, machine: str, ranks: int) -> None:
    no_worse(name, ranks, PRESETS[machine])


@pytest.mark.shows("P6")
@settings(max_examples=6)
@given(
    name=st.sampled_from(MODELS),
    ranks=st.sampled_from([2, 8, 64, 1024]),
    flops=st.floats(-2, 2),
    memory=st.floats(-2, 2),
    inside=st.floats(-3, 1),
    outside=st.floats(-3, 1),
)
def test_never_worse_on_any_machine(
    name: str, ranks: int, flops: float, memory: float, inside: float, outside: float
) -> None:
    """Machines up to 1000 times slower, or 100 times faster, than an H200 in each respect."""
    base = PRESETS["h200"]
    machine = replace(
        base,
        flops={dtype: rate * 10**flops for dtype, rate in base.flops.items()},
        memory_bandwidth=base.memory_bandwidth * 10**memory,
        intra_bandwidth=base.intra_bandwidth * 10**inside,
        inter_bandwidth=base.inter_bandwidth * 10**outside,
    )
    no_worse(name, ranks, machine)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_step_carries_does_not_depend_on_durations(name: str) -> None:
    """Ranks whose batches differ have other durations, and must gather the same. Under a budget, they have to fit it in
    the same way: what activations leave decides what is gathered.
    """
    carried = set()
    for machine in MACHINES:
        plan = under(name, None, ranks=64, machine=machine, optimizer=fxshard.AdamW())
        carried.add(tuple(event.bucket for _, event in plan.of(Kind.UNSHARD, phase=Phase.OPTIMIZER)))
    (buckets,) = carried
    assert len(buckets) >= 2
