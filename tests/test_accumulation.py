"""Gradient accumulation: micro-batches add up to the large batch, and ``no_sync`` reduces nothing until the last."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fxshard
from fxshard._torch import private
from fxshard.schedule.events import Kind, Phase
from tests.pool import Pool
from tests.stack import Stack, batch
from tests.thorough import thorough
from tests.training import full_gradients

MICRO = 3


def this_ranks_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(step, dist.get_rank())


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often gradients are sent."""
    calls: Counter[str] = Counter()
    scatter, every = private.reduce_scatter, dist.all_reduce

    def count(name: str, call: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return call(*args, **kwargs)

        return counting

    with (
        mock.patch.object(private, "reduce_scatter", count("reduce", scatter)),
        mock.patch.object(dist, "all_reduce", count("reduce", every)),
    ):
        yield calls


def backward(model: Any, step: int, scale: float = 1 / MICRO) -> None:
    (model(*this_ranks_batch(step)) * scale).backward()


def loops(zero: int) -> dict[str, Any]:
    model = fxshard.compile(Stack(), zero=zero, optimizer=fxshard.AdamW(lr=1e-3), lowering="eager")
    found: dict[str, Any] = {"counts": [], "buckets": len(model._sharding.buckets)}

    for step in range(MICRO):
        backward(model, step)
    found["each"] = full_gradients(model)
    model.optimizer.zero_grad()

    with counted() as calls:
        with model.no_sync():
            for step in range(MICRO - 1):
                backward(model, step)
                found["counts"].append(calls["reduce"])
                found["published"] = [name for name, p in model.named_parameters() if p.grad is not None]
        found["bytes kept"] = model.bytes_at_rest()["grad"]
        model.eval()
        with torch.no_grad():
            model(*this_ranks_batch(9))  # an evaluation between micro-batches
        model.train()
        found["refused"] = [said(model.optimizer.step), said(lambda: model.clip_grad_norm_(1.0))]
        other = torch.optim.SGD(model.parameters(), lr=1.0)
        found["refused"].append(said(other.step))
        backward(model, MICRO - 1)
        found["counts"].append(calls["reduce"])
    found["once"] = full_gradients(model)
    found["bytes after"] = model.bytes_at_rest()["grad"]
    model.optimizer.step()

    # What zero_grad drops stays dropped, by whomever it is called; gradients that are there already are added to.
    for zero_grad in (model.optimizer.zero_grad, model.zero_grad):
        with model.no_sync():
            backward(model, 5, 100.0)
        zero_grad()
        found["refused"].append(said(model.optimizer.step))
    model.load_state_dict(Stack().state_dict())
    backward(model, 0)
    with model.no_sync(), model.no_sync():
        backward(model, 1)
    backward(model, 2)
    found["mixed"] = full_gradients(model)
    found["schedules"] = (model.schedule, model.schedules["accumulate"])
    return found


def said(call: Any) -> str:
    try:
        call()
    except fxshard.StateError as error:
        return str(error)
    return ""


def of_stages(stages: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    return {zero: loops(zero) for zero in stages}


@pytest.fixture(scope="module", params=[(0, 1, 3), thorough((0, 2))], ids=["ZeRO-0, 1 and 3", "ZeRO-2"])
def found(ranks: Pool, request: pytest.FixtureRequest) -> list[dict[int, dict[str, Any]]]:
    return ranks(2, of_stages, request.param, timeout=350)


@pytest.mark.shows("S11")
def test_micro_batches_equal_one_large_batch(found: list[dict[int, dict[str, Any]]]) -> None:
    model = Stack()
    parts = [batch(step, rank) for step in range(MICRO) for rank in range(2)]
    model(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
    for stages in found:
        for zero, stage in stages.items():
            for way in ("each", "once", "mixed"):
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    off = (stage[way][name] - parameter.grad).norm() / parameter.grad.norm()
                    assert off < 1e-6, f"ZeRO-{zero} {way} {name}: {off}"


@pytest.mark.shows("S11")
def test_stages_agree_bitwise(found: list[dict[int, dict[str, Any]]]) -> None:
    """With two ranks a sum has one order."""
    for stages in found:
        for way in ("each", "once", "mixed"):
            for stage in stages.values():
                assert all(torch.equal(stage[way][name], value) for name, value in stages[0][way].items())


@pytest.mark.shows("S11")
def test_nothing_is_reduced_until_the_last(found: list[dict[int, dict[str, Any]]]) -> None:
    for stages in found:
        for stage in stages.values():
            assert stage["counts"] == [0, 0, stage["buckets"]]
            assert stage["published"] == []


def test_unreduced_gradients_are_not_dropped(found: list[dict[int, dict[str, Any]]]) -> None:
    for stages in found:
        for stage in stages.values():
            step, clip, torchs, *dropped = stage["refused"]
            assert "optimizer.step()" in step and "optimizer.step()" in torchs and "clip_grad_norm_()" in clip
            assert all("3 buckets" in text and "layers.1" in text for text in (step, clip, torchs))
            assert dropped == ["", ""]


def test_memory_and_schedule(found: list[dict[int, dict[str, Any]]]) -> None:
    for stages in found:
        for zero, stage in stages.items():
            step, kept = stage["schedules"]
            full = sum(bucket.grad_bytes for bucket in step.buckets)
            assert stage["bytes kept"] == full  # ZeRO-1 has a place for them, the others make one
            assert stage["bytes after"] == sum(bucket.at_rest().grad for bucket in step.buckets)
            assert kept.resident_bytes >= step.resident_bytes + (full if zero != 1 else 0)
            assert not list(kept.of(Kind.REDUCE, Kind.ALL_REDUCE)) and not list(kept.of(Kind.UPDATE))
            assert len(list(kept.of(Kind.ACCUMULATE))) == stage["buckets"]
            gathers = sorted(event.bucket for _, event in step.of(Kind.UNSHARD))
            assert sorted(event.bucket for _, event in kept.of(Kind.UNSHARD)) == gathers
            assert {event.phase for event in kept.events} == {Phase.FORWARD, Phase.BACKWARD}
            kept.verify()
            assert kept.simulate("cpu").communication_seconds <= step.simulate("cpu").communication_seconds
            assert fxshard.Schedule.from_json(kept.to_json()) == kept
            assert "accumulate" in str(kept)


def test_alone_there_is_nothing_to_synchronise() -> None:
    model = fxshard.compile(Stack(), optimizer=fxshard.AdamW(), lowering="eager")
    plain = Stack()
    for step in range(2):
        x, y = batch(step, 0)
        with model.no_sync():
            model(x, y).backward()
        plain(x, y).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    model.optimizer.step()
