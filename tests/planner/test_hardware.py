"""Hardware presets and what collectives cost on them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxshard._torch.errors import ConfigError
from fxshard.planner.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
)
from fxshard.planner.hardware import PRESETS, Hardware, hardware

TOY = Hardware(
    name="toy",
    flops={"bfloat16": 1000.0, "float32": 100.0},
    memory_bandwidth=100.0,
    memory_bytes=10**6,
    ranks_per_node=4,
    intra_bandwidth=10.0,
    intra_latency=1.0,
    inter_bandwidth=1.0,
    inter_latency=5.0,
    efficiency=0.5,
    memory_efficiency=0.8,
    launch_overhead=2.0,
)


def test_presets_are_found_by_name_and_objects_are_taken_as_they_are() -> None:
    assert list(PRESETS) == ["a100", "h100", "h200", "b200", "gb200", "cpu"]
    assert hardware("h200") is hardware("H200") is PRESETS["h200"]
    assert hardware(TOY) is TOY


@pytest.mark.parametrize("wrong", ["h300", "", None, 7])
def test_an_unknown_name_lists_the_known_ones(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"not known; known are a100, h100, h200, b200, gb200, cpu"):
        hardware(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_capability_is_two_numbers(preset: Hardware) -> None:
    assert preset.capability is None or preset.capability >= (8, 0)
    with pytest.raises(ConfigError, match=r"capability=9, expected \(9, 0\)"):
        replace(preset, capability=9)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_presets_make_sense(preset: Hardware) -> None:
    assert set(preset.flops) == {"bfloat16", "float16", "float32", "float8"}
    assert 0 < preset.efficiency <= 1 and 0 < preset.memory_efficiency <= 1
    assert preset.inter_bandwidth < preset.intra_bandwidth < preset.memory_bandwidth
    assert preset.intra_latency < preset.inter_latency
    assert hash(preset) == hash(replace(preset))


def test_the_h200_is_as_measured() -> None:
    h200 = hardware("h200")
    assert 767e12 <= h200.flops_in(torch.bfloat16) <= 790e12
    assert h200.traffic_per_second == pytest.approx(4.3e12, rel=0.01)


def test_compute_is_bound_by_arithmetic_or_by_memory() -> None:
    assert TOY.compute_seconds(5000, 80, torch.bfloat16) == 10 + 2
    assert TOY.compute_seconds(5000, 80, torch.float32) == 100 + 2
    assert TOY.compute_seconds(5000, 1600, torch.bfloat16) == pytest.approx(20 + 2)


def test_dtypes_without_a_rate_of_their_own() -> None:
    assert TOY.flops_in(torch.float16) == TOY.flops_in(torch.float32) == TOY.flops_in(torch.int64) == 50
    h200 = hardware("h200")
    assert h200.flops_in(torch.float8_e4m3fn) == h200.flops_in(torch.float8_e5m2) == 0.79 * 1979e12


def test_collectives_by_hand() -> None:
    # Inside a node: 3/4 of 400 bytes at 10 bytes/s, two steps of latency.
    assert all_gather_seconds(400, 4, TOY) == 30 + 2
    assert reduce_scatter_seconds(400, 4, TOY) == 32
    assert all_reduce_seconds(400, 4, TOY) == 64
    # Two nodes: half of 400 bytes comes in over four cards of 1 byte/s; 7/8 at 10 bytes/s inside is faster.
    assert all_gather_seconds(400, 8, TOY) == 50 + 2 + 5
    # Sixteen nodes take 15 steps, 32 nodes 20 instead of 31.
    assert all_gather_seconds(0, 64, TOY) == 2 + 15 * 5
    assert all_gather_seconds(0, 128, TOY) == 2 + 20 * 5
    # All to all: half of a rank's own 400 bytes leaves over its own card.
    assert all_to_all_seconds(400, 4, TOY) == 30 + 1
    assert all_to_all_seconds(400, 8, TOY) == 200 + 5


def test_ranks_far_apart_meet_on_the_network() -> None:
    assert all_gather_seconds(100, 2, TOY, stride=2) == 5 + 1
    assert all_gather_seconds(100, 2, TOY, stride=4) == 50 + 5
    assert all_reduce_seconds(100, 2, TOY, stride=4) == 110


@pytest.mark.parametrize("cost", [all_gather_seconds, reduce_scatter_seconds, all_reduce_seconds, all_to_all_seconds])
def test_alone_costs_nothing(cost: object) -> None:
    assert callable(cost)
    assert cost(10**9, 1, hardware("h200")) == 0


@given(size=st.integers(0, 10**11), ranks=st.integers(2, 4096), name=st.sampled_from(sorted(PRESETS)))
def test_more_bytes_are_never_faster(size: int, ranks: int, name: str) -> None:
    for cost in (all_gather_seconds, all_reduce_seconds, all_to_all_seconds):
        assert 0 < cost(size, ranks, hardware(name)) <= cost(2 * size, ranks, hardware(name))
