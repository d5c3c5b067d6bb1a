"""simulate: step times that can be worked out by hand, and what must hold for any schedule."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard._torch.errors import ConfigError
from fxshard.planner.collectives import all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from fxshard.planner.hardware import PRESETS, hardware
from fxshard.schedule.events import Event, Kind, Phase
from fxshard.schedule.schedule import COMMUNICATES, Schedule
from fxshard.schedule.simulate import Simulation, event_seconds, simulate
from fxshard.schedule.verify import ScheduleError
from tests.inspect.schedules import change, evaluation, place, zero3

H200 = hardware("h200")


def _timed(schedule: Schedule, compute: float, gather: float, reduce: float, update: float = 0.0) -> dict[int, float]:
    by_kind = {Kind.COMPUTE: compute, Kind.UNSHARD: gather, Kind.REDUCE: reduce, Kind.UPDATE: update}
    return {i: by_kind.get(event.kind, 0.0) for i, event in enumerate(schedule.events)}


def _run(
    schedule: Schedule, compute: float, gather: float, reduce: float, update: float = 0.0, **options: bool
) -> Simulation:
    return simulate(schedule, "h200", durations=_timed(schedule, compute, gather, reduce, update), **options)


# -- by hand -----------------------------------------------------------------------------------------------------------
# Two layers. Forward is one stretch of compute per layer, backward three: two of them write gradients.


def test_a_gather_behind_compute_is_hidden_but_for_the_first() -> None:
    # forward: gather 0 |0-2|, gather 1 |2-4|; layer 0 computes |2-12|, layer 1 |12-22|.
    result = _run(evaluation(2), compute=10, gather=2, reduce=0)
    assert (result.step_seconds, result.compute_seconds, result.communication_seconds) == (22, 20, 4)
    assert (result.exposed_seconds, result.bound_seconds, result.overlap) == (2, 20, 0.5)


def test_compute_waits_for_gathers_that_are_slower() -> None:
    # gathers |0-10|, |10-20|; layer 0 computes |10-12|, layer 1 |20-22|.
    result = _run(evaluation(2), compute=2, gather=10, reduce=0)
    assert (result.step_seconds, result.exposed_seconds, result.bound_seconds) == (22, 18, 20)


def test_without_room_a_gather_starts_when_the_bucket_before_is_released() -> None:
    # One place in the arena: gather |0-3|, compute |3-8|, gather |8-11|, compute |11-16|.
    result = _run(evaluation(2, prefetch=0), compute=5, gather=3, reduce=0)
    assert (result.step_seconds, result.exposed_seconds) == (16, 6)


def test_a_training_step() -> None:
    # Layer 1 is kept. gather 0 |0-1|, 1 |1-2|; forward |1-11|, |11-21|. Backward of layer 1 |21-51|, reduce |51-55|.
    # Layer 0 is gathered again |11-12|; backward |51-81|, reduce |81-85|, updates |85-86|, |86-87|: all reductions
    # are over before the first.
    schedule = zero3(2)
    result = _run(schedule, compute=10, gather=1, reduce=4, update=1)
    assert result.step_seconds == 87
    assert (result.compute_seconds, result.exposed_seconds) == (82, 5)
    reduce = result.spans[place(schedule, Kind.REDUCE, 0, Phase.BACKWARD)]
    assert (reduce.stream, reduce.start, reduce.stop) == ("reduce", 81, 85)


def test_compute_waits_until_a_gradient_bucket_is_free() -> None:
    # Layer 1 takes the gradient bucket of layer 3, whose reduction is long. Gathers do not meet it on the network.
    schedule = zero3(4)
    result = _run(schedule, compute=1, gather=0, reduce=100, shared_link=False)
    grad = result.spans[place(schedule, Kind.GRAD, 1, Phase.BACKWARD)]
    reduced = result.spans[place(schedule, Kind.REDUCE, 3, Phase.BACKWARD)]
    assert (grad.start, grad.stop) == (11, 107) == (reduced.start + 4, reduced.stop)
    assert result.step_seconds == 7 + 4 * 100


def test_one_link_serves_whoever_is_ready_first_and_two_serve_both() -> None:
    schedule = zero3(3, keep_last=False)
    shared = _run(schedule, compute=1, gather=10, reduce=10)
    separate = _run(schedule, compute=1, gather=10, reduce=10, shared_link=False)
    assert separate.step_seconds < shared.step_seconds
    assert (shared.bound_seconds, separate.bound_seconds) == (90, 60)
    busy = sorted((span.start, span.stop) for span in shared.spans if span.stream != "compute")
    assert all(before[1] <= after[0] for before, after in pairwise(busy))


def test_the_next_steps_first_gathers_hide_behind_the_updates() -> None:
    # Updates |t, t+5|, |t+5, t+10|: layer 0 is updated last, so its gather of 2 still delays the next step by 2.
    result = _run(zero3(2, carry=1), compute=10, gather=2, reduce=0, update=5)
    at_start = _run(zero3(2), compute=10, gather=2, reduce=0, update=5)
    assert result.step_seconds == at_start.step_seconds == 2 + 20 + 60 + 10


def test_a_carried_gather_is_hidden_where_its_update_comes_early() -> None:
    # The same with the gather allowed behind the first update: it runs beside the second.
    schedule = zero3(2, carry=1)
    gather = place(schedule, Kind.UNSHARD, 0, Phase.OPTIMIZER)
    early = change(schedule, gather, waits_for=(place(schedule, Kind.UPDATE, 1, Phase.OPTIMIZER),))
    assert _run(early, compute=10, gather=2, reduce=0, update=5).step_seconds == 20 + 60 + 10
    assert _run(early, compute=10, gather=2, reduce=0, update=5, steady=False).step_seconds == 2 + 20 + 60 + 10


# -- in general --------------------------------------------------------------------------------------------------------

schedules = st.builds(
    zero3,
    layers=st.integers(1, 5),
    ranks=st.sampled_from([1, 2, 8, 64, 1024]),
    prefetch=st.integers(0, 3),
    keep_last=st.booleans(),
    carry=st.integers(0, 2),
    zero=st.integers(0, 3),
)


@given(schedule=schedules, name=st.sampled_from(sorted(PRESETS)), shared_link=st.booleans(), steady=st.booleans())
def test_what_always_holds(schedule: Schedule, name: str, shared_link: bool, steady: bool) -> None:
    result = simulate(schedule, name, shared_link=shared_link, steady=steady)
    assert result.bound_seconds <= result.step_seconds * (1 + 1e-9)
    assert result.exposed_seconds == result.step_seconds - result.compute_seconds
    assert result.exposed_seconds >= -1e-12
    assert 0 <= result.overlap <= 1
    assert [span.index for span in result.spans] == list(range(len(schedule)))
    for stream in ("compute", "gather", "reduce"):
        spans = [span for span in result.spans if span.stream == stream]
        assert all(span.start <= span.stop for span in spans)
        assert all(before.stop <= after.start for before, after in pairwise(spans))
    times = [at for at, _ in result.memory]
    assert times == sorted(set(times))
    assert schedule.resident_bytes <= result.peak_bytes <= schedule.peak_bytes


@given(schedule=schedules, faster=st.floats(1, 100))
def test_more_bandwidth_is_never_slower(schedule: Schedule, faster: float) -> None:
    better = replace(H200, intra_bandwidth=H200.intra_bandwidth * faster, inter_bandwidth=H200.inter_bandwidth * faster)
    separate = [simulate(schedule, hw, shared_link=False).step_seconds for hw in (better, H200)]
    assert separate[0] <= separate[1] * (1 + 1e-9)


@pytest.mark.parametrize("zero", range(4))
def test_one_rank_does_not_communicate(zero: int) -> None:
    result = simulate(zero3(3, ranks=1, zero=zero), "h200")
    assert result.communication_seconds == result.exposed_seconds == 0
    assert result.step_seconds == pytest.approx(result.compute_seconds)
    assert result.overlap == 1


def test_a_thousand_ranks_cost_more_than_eight() -> None:
    few, many = (simulate(zero3(3, ranks=ranks), "h200") for ranks in (8, 1024))
    assert few.communication_seconds < many.communication_seconds
    assert few.step_seconds < many.step_seconds


def test_memory_follows_buffers_and_activations() -> None:
    schedule = evaluation(2, prefetch=0)
    result = _run(schedule, compute=5, gather=3, reduce=0)
    size, rest = schedule.buckets[0].gathered_bytes, schedule.resident_bytes
    # Activations (1000, then 2000 bytes) are there when their stretch is over, at 8 and 16. The gathers take one place.
    assert result.memory == ((0.0, rest + size), (8.0, rest + 1000 + size), (16.0, rest + 2000))
    assert result.peak_bytes == rest + 1000 + size


def test_collectives_by_placement() -> None:
    def costs(zero: int, kind: Kind) -> set[float]:
        schedule = zero3(2, ranks=8, zero=zero)
        seconds = event_seconds(schedule, H200)
        return {seconds[i] for i, _ in schedule.of(kind)}

    sharded, replicated = (zero3(2, ranks=8, zero=zero).buckets[0].grad_bytes for zero in (3, 0))
    assert costs(0, Kind.UNSHARD) == {0.0}
    assert costs(0, Kind.REDUCE) == {all_reduce_seconds(replicated, 8, H200)}
    for zero in (1, 2, 3):
        assert costs(zero, Kind.UNSHARD) == {all_gather_seconds(sharded, 8, H200)}
        assert costs(zero, Kind.REDUCE) == {reduce_scatter_seconds(sharded, 8, H200)}


def test_hybrid_sharding_reduces_twice() -> None:
    hybrid = zero3(2, ranks=8, replicas=8)
    seconds = event_seconds(hybrid, H200)
    size = hybrid.buckets[0].grad_bytes
    reduce, add = next(i for i, _ in hybrid.of(Kind.REDUCE)), next(i for i, _ in hybrid.of(Kind.ALL_REDUCE))
    assert seconds[reduce] == reduce_scatter_seconds(size, 8, H200)
    assert seconds[add] == all_reduce_seconds(size / 8, 8, H200, stride=8)


def test_replicas_share_no_link_with_shards_inside_a_node() -> None:
    """Shards are gathered and reduced over NVLink while the sums of the layer before cross the network, if they may."""
    for ranks, same_link in ((8, False), (16, True)):  # on a machine with eight to a node
        hybrid = zero3(6, ranks, replicas=4)
        simulation = simulate(hybrid, H200, durations={i: 1.0 for i, _ in hybrid.of(*COMMUNICATES)})
        kinds = [(hybrid.events[span.index].kind, span) for span in simulation.spans]
        inner = [span for kind, span in kinds if kind in (Kind.UNSHARD, Kind.REDUCE)]
        outer = [span for kind, span in kinds if kind is Kind.ALL_REDUCE]
        at_once = any(a.start < b.stop and b.start < a.stop for a in inner for b in outer)
        assert at_once is not same_link
        assert all(span.stream == "replicas" for span in outer)
        for span in outer:
            bucket = hybrid.events[span.index].bucket
            (reduced,) = [s for k, s in kinds if k is Kind.REDUCE and hybrid.events[s.index].bucket == bucket]
            assert span.start >= reduced.stop


def test_unknown_hardware_and_schedules_that_cannot_run_are_refused() -> None:
    schedule = zero3()
    with pytest.raises(ConfigError, match="a100, h100, h200, b200, gb200, cpu"):
        simulate(schedule, "h300")
    wait = place(schedule, Kind.WAIT, 0, Phase.FORWARD)
    reshard = place(schedule, Kind.RESHARD, 0, Phase.FORWARD)
    with pytest.raises(ScheduleError, match=f"event {wait} .* can never start") as caught:
        simulate(change(schedule, wait, waits_for=(reshard,)), "h200")
    assert caught.value.index == wait


def test_ten_times_the_events_take_little_more_than_ten_times_as_long() -> None:
    """However fast the machine: what looks at every pair of events would take a hundred times as long."""
    few, many = (min(_seconds_to_simulate(repeated(count)) for _ in range(3)) for count in (1_000, 10_000))
    assert many < 30 * few, f"{few:.4f} s for 1000 events, {many:.4f} s for 10000"


def repeated(count: int) -> Schedule:
    """The same step again and again, as far as streams and dependencies are concerned."""
    layers = zero3(10, ranks=8, carry=1)
    events: list[Event] = []
    while len(events) < count:
        shift = len(events)
        events += [replace(event, waits_for=tuple(need + shift for need in event.waits_for)) for event in layers.events]
    return replace(layers, events=tuple(events))


def _seconds_to_simulate(schedule: Schedule) -> float:
    start = time.process_time()
    simulate(schedule, "h200", steady=False)
    return time.process_time() - start


def test_without_overlap_everything_takes_turns() -> None:
    schedule = zero3(4, ranks=8)
    apart = simulate(schedule, "h200", overlap=False)
    total = apart.compute_seconds + apart.communication_seconds
    assert apart.step_seconds == pytest.approx(total) == pytest.approx(apart.bound_seconds)
    assert simulate(schedule, "h200").step_seconds < total
