"""Largest magnitudes that an optimizer's update leaves: scales are those of a pass over the masters, and never old."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxshard
from fxshard._torch.errors import StateError
from fxshard.kernels import float8
from tests.precision.nets import VOCAB, net
from tests.thorough import thorough
from tests.toy import batch

BF16 = torch.bfloat16


def made(scaling: str = "tensor", zero: int = 3, **options: Any) -> fxshard.ShardedModule:
    precision = fxshard.Float8(scaling=scaling, smallest=0)
    optimizer = fxshard.AdamW(lr=1e-2, **options)
    return fxshard.compile(net(), zero=zero, precision=precision, optimizer=optimizer, lowering="eager")


def forward(model: fxshard.ShardedModule) -> torch.Tensor:
    return model(*batch(0, 1, 0, VOCAB, size=3, length=14))


def backward(model: fxshard.ShardedModule) -> None:
    model.optimizer.zero_grad()
    forward(model).backward()


def measured(model: fxshard.ShardedModule) -> int:
    return model._sharding.engine._scales.measured


def scales_of(model: fxshard.ShardedModule) -> list[float]:
    return [scale for bucket in model._sharding.buckets if bucket.copies for scale in bucket.copies.scales.tolist()]


def check_scales(model: fxshard.ShardedModule) -> None:
    """Those that forward used, against masters."""
    for bucket in model._sharding.buckets:
        if bucket.copies is None:
            continue
        scales = iter(bucket.copies.scales.tolist())
        for name in bucket.plan.params:
            largest = bucket.local(name).to(BF16).abs().max().view(1, 1)
            assert next(scales) == float8.scales_of(largest, float8.E4M3).item()


@pytest.mark.shows("F3")
@pytest.mark.parametrize(
    ("zero", "options"),
    [(3, {}), (1, {}), (3, {"state": "8bit"}), (3, {"offload": "host"}), thorough(1, {"state": "bf16", "nan": "skip"})],
)
def test_scales_are_made_from_what_the_update_left(zero: int, options: dict[str, Any]) -> None:
    model = made(zero=zero, **options)
    backward(model)
    once = measured(model)
    assert once > 0
    scales = [scales_of(model)]
    for lr in (1.0, 0.01, 3.0):
        model.optimizer.param_groups[0]["lr"] = lr
        model.optimizer.step()
        backward(model)
        check_scales(model)
        scales.append(scales_of(model))
    assert measured(model) == once
    assert scales[0] != scales[1] and scales[2] != scales[3]


def write(model: fxshard.ShardedModule) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)


def load(model: fxshard.ShardedModule) -> None:
    whole = model.full_state_dict()
    model.load_state_dict({name: value * 5 for name, value in whole.items()})


def foreign_step(model: fxshard.ShardedModule) -> None:
    backward(model)
    torch.optim.SGD(model.parameters(), lr=50.0).step()


def without_a_gradient(model: fxshard.ShardedModule) -> None:
    backward(model)
    next(parameter for name, parameter in model.named_parameters() if name.endswith("up.weight")).grad = None
    model.optimizer.step()


def told(model: fxshard.ShardedModule) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(5.0)
    model.parameters_changed()


@pytest.mark.shows("F3")
@pytest.mark.parametrize(
    ("change", "zero"),
    [(write, 3), (write, 1), thorough(load, 3), (foreign_step, 1), (without_a_gradient, 3), thorough(told, 3)],
)
def test_what_is_written_otherwise_is_measured(change: Callable[[fxshard.ShardedModule], None], zero: int) -> None:
    model = made(zero=zero)
    backward(model)
    model.optimizer.step()
    change(model)
    before = measured(model)
    forward(model)
    assert measured(model) > before
    check_scales(model)


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_change_that_no_counter_sees_is_an_error(factor: float) -> None:
    model = made()
    backward(model)
    model.optimizer.step()
    for name, parameter in model.named_parameters():
        if name.endswith("up.weight"):
            parameter.data.mul_(factor)
    backward(model)
    model.optimizer.step()
    with pytest.raises(StateError, match=r"changed after an optimizer step in a way that leaves no trace"):
        forward(model)


def test_scales_of_rows_are_measured() -> None:
    model = made("row")
    backward(model)
    before = measured(model)
    model.optimizer.step()
    backward(model)
    assert measured(model) > before
