"""The collectives of a trace, and the turns of a rank that shares the device."""

from __future__ import annotations

from typing import Any

import pytest

from fxshard.bench.collectives import collectives, report, turns
from fxshard.bench.trace import STEP
from tests.test_bench_trace import BACKWARD, COMMUNICATION, COMPUTE, event

GATHER = "ncclDevKernel_AllGather_RING(ncclDevKernelArgsStorage<4096ul>)"


def product(ts: float, dur: float) -> dict[str, Any]:
    return event("kernel", "nvjet", ts, dur, tid=COMPUTE, stream=COMPUTE, grid=[132, 1, 1])


def gather(ts: float, dur: float, correlation: int) -> dict[str, Any]:
    about = {"Collective name": "_allgather_base", "In msg nelems": 4_000_000, "grid": [64, 1, 1]}
    return event("kernel", GATHER, ts, dur, tid=COMMUNICATION, correlation=correlation, **about)


HOST = [
    event("user_annotation", STEP, 100, 800),
    event("user_annotation", "fxshard forward unshard layers.0", 110, 50),
    event("user_annotation", "fxshard backward unshard layers.0", 210, 50, tid=BACKWARD),
    event("cuda_runtime", "cudaLaunchKernelExC", 130, 5, correlation=1),
    event("cuda_runtime", "cudaLaunchKernelExC", 230, 5, tid=BACKWARD, correlation=2),
]
ALONE = [*HOST, product(1000, 100), gather(1050, 150, 1), product(1300, 100), gather(1320, 50, 2)]
SHARED = [
    *HOST,
    # A turn of 2500 µs, twice: first under a product, then under a gather that has waited for 700 before.
    product(1000, 100),
    gather(1050, 150, 1),
    product(1300, 2600),
    product(3900, 100),
    gather(4000, 3300, 2),
    product(7200, 100),
    # And a third, in which nothing of this rank is on the device.
    product(9800, 100),
]


def test_collectives_with_their_events_and_what_is_beside_them() -> None:
    first, second = collectives(ALONE)
    assert first == {
        "name": "fxshard forward unshard layers.0",
        "kind": "_allgather_base",
        "launched_ms": pytest.approx(-0.87),
        "begin_ms": pytest.approx(0.05),
        "ms": pytest.approx(0.15),
        "bare_ms": pytest.approx(0.1),
        "sent": 4_000_000,
        "blocks": 64,
    }
    assert (second["name"], second["bare_ms"]) == ("fxshard backward unshard layers.0", 0.0)


def test_turns_on_a_shared_device() -> None:
    found = turns(SHARED)
    assert found is not None
    assert [silence.under for silence in found.silences] == ["compute", "communication", "nothing"]
    assert found.turn_ms == pytest.approx(2.5)
    assert found.period_ms == pytest.approx((3.3 + 2.6) / 2)
    assert found.total("communication") == pytest.approx(3.2)
    assert found.spinning_ms == pytest.approx(0.7)


def test_long_kernels_are_no_turns() -> None:
    assert turns(ALONE) is None
    assert turns([*HOST, product(1000, 2600), product(3600, 2600), product(6200, 2600)]) is None


def test_the_report() -> None:
    alone = report(collectives(ALONE), turns(ALONE))
    assert "2 _allgather_base of 4.0 M elements: 0.05 to 0.15 ms, 2 in < 1.5" in alone
    assert "the device was this rank's all the time" in alone
    assert "3, 2.50 ms each" in report(collectives(SHARED), turns(SHARED))
