"""Parts of Muon's matrices between tensor-parallel ranks are events: planned, verified, simulated, run as planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fxshard
from fxshard.planner.collectives import all_to_all_seconds
from fxshard.planner.hardware import hardware
from fxshard.schedule.events import TENSOR, Event, Kind, Phase
from fxshard.schedule.simulate import event_seconds
from fxshard.schedule.verify import ScheduleError
from tests.inspect.mutations.editing import moved
from tests.inspect.schedules import relinked
from tests.optim.test_tensor_parallel_muon import MUON, against_plain
from tests.parallel import parallel_wide, two_by_two
from tests.parallel_muon import EAGER, WAYS, planned
from tests.pool import Pool
from tests.stack import wide, wide_batch
from tests.thorough import thorough
from tests.training import deliver, random_gradients


def trained(name: str) -> tuple[str, list[tuple[int, str]]]:
    """The schedule of a run, and what a step really moves between tensor-parallel ranks, in order: the dtype, and the
    bytes that a rank sends or gets, whichever are more."""
    mesh, send = two_by_two(), dist.all_to_all_single
    model = fxshard.compile(parallel_wide(mesh), mesh=mesh["dp"], **EAGER, **WAYS[name])
    model(*wide_batch(0, mesh.get_local_rank("dp"))).backward()
    sent: list[tuple[int, str]] = []
    group = model._sharding.channels.tensor.group

    def noted(output: Any, given: torch.Tensor, *args: Any, **options: Any) -> Any:
        if options["group"] is group:
            sent.append((max(given.nbytes, output.nbytes), str(given.dtype)))
        return send(output, given, *args, **options)

    with mock.patch.object(dist, "all_to_all_single", noted):
        model.optimizer.step()
    return model.schedule.to_json(), sent


@pytest.fixture(scope="module")
def plans(ranks: Pool) -> dict[str, fxshard.Schedule]:
    return {name: fxshard.Schedule.from_json(ranks(1, planned, name)[0]) for name in WAYS}


@dataclass
class Ran:
    """A way, and what each rank found."""

    way: str
    ranks: list[tuple[str, list[tuple[int, str]]]]


@pytest.fixture(scope="module", params=["rows", thorough("whole")])
def ran(ranks: Pool, request: pytest.FixtureRequest) -> Ran:
    """One of the ways that are planned, run on ranks."""
    return Ran(request.param, ranks(4, trained, request.param))


def between_tensor_ranks(schedule: fxshard.Schedule) -> list[Event]:
    return [event for _, event in schedule.of(Kind.EXCHANGE) if event.stream == TENSOR]


@pytest.mark.shows("T4", "T5")
@pytest.mark.parametrize("way", WAYS)
def test_a_plan_has_them_there_and_back_around_the_computation(plans: dict[str, fxshard.Schedule], way: str) -> None:
    schedule = plans[way]
    schedule.verify()
    names = {f"net.{i}.weight" for i in (0, 2, 4)}
    found = between_tensor_ranks(schedule)
    assert {name for event in found for name in event.params} == names and {e.group for e in found} == {"tp×2"}
    there, back = found[::2], found[1::2]
    assert all(e.dtype is torch.float32 and not e.writes for e in there) and all(
        e.dtype is torch.bfloat16 for e in back
    )
    assert [e.bytes for e in there] == [2 * e.bytes for e in back]
    assert "tp×2: parts of" in str(schedule) and '"tensor"' in schedule.to_html()
    kinds = [
        (e.kind.value, e.stream) for e in schedule.events if e.phase is Phase.OPTIMIZER and "net.2.weight" in e.params
    ]
    around = [("exchange", TENSOR), ("compute", "compute"), ("exchange", TENSOR), ("compute", "compute")]
    if way == "rows":
        around = [("exchange", "gather"), *around, ("exchange", "gather")]
    assert kinds[: len(around)] == around


@pytest.mark.shows("T4", "T7")
def test_the_run_is_the_plan(plans: dict[str, fxshard.Schedule], ran: Ran) -> None:
    plan = plans[ran.way]
    for schedule, _ in ran.ranks:
        run = fxshard.Schedule.from_json(schedule)
        for i, (mine, theirs) in enumerate(zip(run.events, plan.events, strict=True)):
            assert mine == theirs, f"event {i}"
        assert run == plan


@pytest.mark.shows("T5")
def test_bytes_are_those_that_are_sent(plans: dict[str, fxshard.Schedule], ran: Ran) -> None:
    """Those of the rank with most to orthogonalize; data-parallel ranks that have no parts make no exchange."""
    of_ranks = [sent for _, sent in ran.ranks]
    most = [max(sent for sent in each if sent is not None) for each in zip_longest(*of_ranks)]
    assert most == [(event.bytes, str(event.dtype)) for event in between_tensor_ranks(plans[ran.way])]


@pytest.mark.shows("T5")
def test_the_simulation_counts_them(plans: dict[str, fxshard.Schedule]) -> None:
    schedule, machine = plans["rows"], hardware("h200")
    seconds, spans = event_seconds(schedule, machine), schedule.simulate("h200").spans
    for i, event in schedule.of(Kind.EXCHANGE):
        if event.stream == TENSOR:
            assert seconds[i] == all_to_all_seconds(event.bytes, 2, machine) > 0
            assert spans[i].stream == TENSOR and spans[i].stop - spans[i].start == pytest.approx(seconds[i])
    slower = replace(machine, intra_bandwidth=machine.intra_bandwidth / 1000)
    assert schedule.simulate(slower).step_seconds > schedule.simulate(machine).step_seconds


@pytest.mark.shows("P1", "T5")
def test_another_order_across_groups_is_refused(plans: dict[str, fxshard.Schedule]) -> None:
    """Matrices to data-parallel ranks first, then parts of others to tensor-parallel ones: on all ranks, or on none."""
    schedule = plans["rows"]
    first, second = [i for i, _ in schedule.of(Kind.EXCHANGE)][:2]
    assert schedule.events[first].stream == "gather" and schedule.events[second].stream == TENSOR
    with pytest.raises(ScheduleError, match="in cpu×2 has its turn") as caught:
        relinked(schedule, moved(schedule, second, first)).verify()
    assert caught.value.rule == "exchanges_have_one_order" and caught.value.index == first


def crossing() -> list[str]:
    mesh = two_by_two()
    return against_plain(MUON, parallel_wide(mesh), wide(), mesh=mesh["dp"], **WAYS["rows"])


@pytest.mark.shows("T4")
def test_matrices_on_several_ranks_of_both_dimensions_are_bitwise_those_of_one_process(ranks: Pool) -> None:
    assert ranks(4, crossing) == [[]] * 4


def without_one_gradient() -> dict[str, list[str]]:
    """Steps in which a matrix has no gradient: it stays as it is, and the others move as in one process."""
    mesh, found = two_by_two(), {}
    for missing in ("net.0.weight", "net.2.weight"):
        plain = wide()
        reference = MUON.build(plain)
        model = fxshard.shard(parallel_wide(mesh), optimizer=MUON, mesh=mesh["dp"], **WAYS["rows"])
        grads = random_gradients(plain, 0)
        grads.pop(missing)
        deliver(model, grads)
        for name, parameter in plain.named_parameters():
            parameter.grad = grads.get(name)
        model.optimizer.step()
        reference.step()
        values = model.full_state_dict()
        found[missing] = [name for name, value in plain.state_dict().items() if not torch.equal(value, values[name])]
    return found


@pytest.mark.shows("T4")
def test_a_matrix_without_a_gradient_stays_as_it_is(ranks: Pool) -> None:
    assert ranks(4, without_one_gradient) == [{"net.0.weight": [], "net.2.weight": []}] * 4
