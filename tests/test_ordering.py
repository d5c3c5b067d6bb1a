"""What the runtime waits for is what the schedule's dependencies say: no less, and no more."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.schedule.events import OF_MODEL, Kind
from tests.inspect.real import SCHEDULES
from tests.ordering import observed
from tests.parallel import parallel_wide, two_by_two
from tests.pool import Pool
from tests.precision.nets import single, this_ranks_tokens
from tests.stack import Stack, batch, deep, wide, wide_batch
from tests.thorough import thorough
from tests.training import my_data_for, train_step, with_debug

STEPS = 3
ADAMW = fxshard.AdamW(lr=1e-3)
MUON = fxshard.Muon(lr=1e-2, adamw=ADAMW)
MIXED = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)

STACKS: dict[str, dict[str, Any]] = {
    **{f"zero {zero}": {"zero": zero} for zero in (0, 3)},
    "bf16, zero 2": {"precision": MIXED, "zero": 2},
}
"""How the stack is compiled on two ranks."""

BY_ROWS: dict[str, Any] = {"optimizer": MUON, "layout": "rows"}
"""How a model is compiled whose matrices lie on several ranks, so that they travel."""

MORE_STACKS: dict[str, dict[str, Any]] = {
    **{f"{ahead} ahead": {"prefetch": ahead} for ahead in range(3)},
    "nothing kept": {"keep_resident": False},
    "nothing deferred": {"defer_wgrad": False},
    "a unit of one layer": {"units": ["layers.0"]},
    **{f"bf16, zero {zero}": {"precision": MIXED, "zero": zero} for zero in (1, 3)},
    **{f"zero {zero}": {"zero": zero} for zero in (1, 2)},
    **{f"muon, zero {zero}": {"optimizer": MUON, "zero": zero} for zero in range(4)},
}

QUANTIZED: dict[str, dict[str, Any]] = {
    f"{gather}, zero {zero}": {"precision": fxshard.MXFP8(gather=gather), "zero": zero}
    for gather, zero in (("staged", 2), ("direct", 3))
} | {
    f"float8 by {scaling}, zero {zero}": {"precision": fxshard.Float8(scaling=scaling, smallest=0), "zero": zero}
    for scaling, zero in (("row", 1), ("tensor", 3))
}


def this_ranks_wide_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return wide_batch(step, dist.get_rank())


def frozen() -> Stack:
    model = deep()
    model.layers[1].requires_grad_(False)
    return model


def differences(
    options: dict[str, Any], make: Callable[[], nn.Module] = deep, data: Any = my_data_for, evaluated: bool = True
) -> list[str]:
    """Between what steps wait for and what their schedules say: training, inside ``no_sync``, and evaluation."""
    options = with_debug({"optimizer": ADAMW, **options})
    watched = observed(lambda: fxshard.compile(make(), lowering="eager", **options))
    model = watched.model

    def inputs(step: int) -> Any:
        return data(model, step) if data is my_data_for else data(step)

    def train(step: int) -> None:
        train_step(model, *inputs(step))

    def accumulate() -> None:
        with model.no_sync():
            model(*inputs(STEPS)).backward()

    def evaluate() -> None:
        with torch.no_grad():
            model(*inputs(STEPS))

    train(0)
    found = []
    for step in range(1, STEPS):
        found += watched.step(lambda step=step: train(step), model.schedules["train"])
    accumulate()  # what the last step gathered is used up
    found += watched.step(accumulate, model.schedules["accumulate"])
    if not evaluated:
        return found
    evaluate()
    return found + watched.step(evaluate, model.schedules["eval"])


def stacks() -> dict[str, list[str]]:
    found = {name: differences(options, evaluated=name == "zero 3") for name, options in STACKS.items()}
    return found | {
        "frozen": differences({}, frozen, evaluated=False),
        "muon by rows": differences(BY_ROWS, wide, this_ranks_wide_batch, evaluated=False),
    }


def more_stacks() -> dict[str, list[str]]:
    return {name: differences(options) for name, options in MORE_STACKS.items()}


def quantized(names: tuple[str, ...] = ("direct, zero 3", "float8 by tensor, zero 3")) -> dict[str, list[str]]:
    return {name: differences(QUANTIZED[name], single, this_ranks_tokens) for name in names}


def more_quantized() -> dict[str, list[str]]:
    return quantized(tuple(QUANTIZED))


def replicated() -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {"two by two": differences({"mesh": mesh, "optimizer": MUON, "zero": 1}, evaluated=False)}


def tensor_parallel() -> dict[str, list[str]]:
    """Matrices that lie on several data-parallel ranks, on several tensor-parallel ones, and on both."""
    mesh = two_by_two()
    options = {"mesh": mesh["dp"], "units": ["net"], **BY_ROWS}
    watched = partial(wide_batch, rank=mesh.get_local_rank("dp"))
    return {"muon": differences(options, lambda: parallel_wide(mesh), watched, evaluated=False)}


def offloading() -> dict[str, list[str]]:
    """With the smallest budget for which nothing is computed again."""
    options: dict[str, Any] = {"activations": "offload", "memory_budget": 1}
    try:
        differences(options)
    except fxshard.BudgetError as error:
        options["memory_budget"] = error.smallest
    return {"offload": differences(options)}


@pytest.mark.shows("A5")
@pytest.mark.parametrize(
    "n, run",
    [
        (2, stacks),
        thorough(2, quantized),
        (2, offloading),
        (4, replicated),
        thorough(4, tensor_parallel),
        thorough(2, more_stacks),
        thorough(2, more_quantized),
    ],
)
def test_waits_are_the_dependencies(ranks: Pool, n: int, run: Callable[[], dict[str, list[str]]]) -> None:
    for rank, found in enumerate(ranks(n, run)):
        assert {name: lines[:5] for name, lines in found.items() if lines} == {}, f"on rank {rank}"


def test_every_kind_of_event_is_among_them() -> None:
    by_rows = fxshard.plan(wide(), wide_batch(0, 0), world_size=2, lowering="eager", **BY_ROWS)
    replicas = fxshard.plan(Stack(), batch(0, 0), world_size=4, shard_size=2, lowering="eager", optimizer=ADAMW)
    precision = fxshard.Float8(smallest=0)
    float8 = fxshard.plan(wide(), wide_batch(0, 0), world_size=2, lowering="eager", precision=precision)
    schedules = (by_rows, replicas, by_rows.accumulating(), float8, SCHEDULES["activations on the host"]())
    kinds = {event.kind for schedule in schedules for event in schedule.events}
    assert kinds == set(Kind) - {*OF_MODEL}  # what these wait for is up to torch's operators


def without_waiting_for_memory() -> list[str]:
    with mock.patch("fxshard.runtime.frame.Arena.release", lambda arena, slot, when: None):
        return differences({})


def test_a_wait_that_is_missing_is_found(ranks: Pool) -> None:
    found = ranks(2, without_waiting_for_memory)[0]
    assert any("unshard" in line and "does not wait for" in line for line in found)


@pytest.mark.parametrize("switch", [thorough("overlap"), thorough("arena")])
def test_where_nothing_overlaps_more_is_waited_for_and_nothing_less(ranks: Pool, switch: str) -> None:
    found = ranks(2, differences, {switch: False})[0]
    assert found and all("which the schedule does not say" in line for line in found)
