"""Float8 on several ranks: gathers change nothing and move half, scales cost one collective, losses are the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.kernels.float8_ops import float8_quantize
from fxshard.schedule.events import Kind, Phase
from tests.pool import Pool
from tests.precision import float8_reference as reference
from tests.precision.nets import VOCAB, single, this_ranks_tokens
from tests.precision.traffic import Bytes, gathered
from tests.thorough import thorough
from tests.toy import batch
from tests.training import EPS, Run, full_gradients, mean_over_ranks, train_step, with_debug

BF16 = torch.bfloat16
ADAMW = fxshard.AdamW(lr=1e-2, eps=EPS)


def made(scaling: str, zero: int, gather: str = "fp8", **options: Any) -> fxshard.ShardedModule:
    width = 2 if scaling == "block" else 1
    precision = fxshard.Float8(scaling=scaling, gather=gather, smallest=0)
    options = {"optimizer": ADAMW, "units": ["layers.*"], **options}
    return fxshard.compile(single(width), zero=zero, precision=precision, lowering="eager", **with_debug(options))


def trained(model: fxshard.ShardedModule, steps: int = 3, evaluated: bool = True) -> Run:
    losses, grads = [], {}
    for step in range(steps):
        loss = model(*this_ranks_tokens(step))
        loss.backward()
        losses.append(mean_over_ranks(loss))
        grads = full_gradients(model)
        model.optimizer.step()
        model.optimizer.zero_grad()
        if evaluated:
            with torch.no_grad():
                losses.append(mean_over_ranks(model(*this_ranks_tokens(step))))
    return Run(losses, grads, model.full_state_dict())


@dataclass
class Gathered:
    """What a model did whose weights are gathered in float8."""

    off: Run
    """Gathered in bf16."""
    on: Run
    same: bool
    """Whether what was gathered is the quantized whole."""
    held: tuple[int, int]
    """Bytes of parameters at rest, measured and planned."""
    quantized: set[int]
    """How often copies were made."""


def both_gathers(scaling: str, zero: int) -> Gathered:
    evaluated = scaling == "tensor"
    off, model = trained(made(scaling, zero, "bf16"), evaluated=evaluated), made(scaling, zero)
    held = model.bytes_at_rest()["param"], sum(plan.at_rest().param for plan in model._sharding.plans)
    on = trained(model, evaluated=evaluated)
    quantized = {bucket.copies.quantized for bucket in model._sharding.buckets if bucket.copies is not None}
    whole = model.full_state_dict()
    same = []
    for bucket in model._sharding.buckets:
        if bucket.plan.float8 is None:
            continue
        engine, copies = model._sharding.engine, bucket.plan.all_copies
        engine._scales.refresh(Phase.FORWARD)
        memory = None if bucket.plan.resident else torch.empty(copies.number * bucket.plan.layout.numel).byte()
        transfer = engine._transfer(bucket, memory, copies)
        engine._gather(bucket, transfer, None, []).token.wait()
        views = transfer.views()
        for i, name in enumerate(bucket.plan.params):
            for axis, payload, scales in ((1, *views[4 * i : 4 * i + 2]), (0, *views[4 * i + 2 : 4 * i + 4])):
                if payload is not None and scales is not None:
                    data, expected = float8_quantize(whole[name].to(BF16), scaling, axis)
                    same.append(torch.equal(data.view(torch.uint8), payload.view(torch.uint8)))
                    same.append(torch.equal(scales, expected))
    return Gathered(off, on, bool(same) and all(same), held, quantized)


@pytest.mark.shows("F2")
@pytest.mark.parametrize(
    ("scaling", "ranks_", "zero"),
    [
        ("tensor", 2, 3),
        thorough("block", 2, 1),
        thorough("block", 3, 1),
        thorough("tensor", 4, 3),
        thorough("row", 3, 1),
        thorough("row", 3, 2),
        thorough("row", 2, 3),
        thorough("row", 1, 3),
        thorough("block", 2, 3),
    ],
)
def test_quantizing_before_or_after_the_gather_is_the_same(ranks: Pool, scaling: str, ranks_: int, zero: int) -> None:
    for found in ranks(ranks_, both_gathers, scaling, zero):
        assert found.on.same(found.off)
        assert len(set(found.on.losses)) == len(found.on.losses) >= 3  # weights change in every step
        assert found.same
        assert found.held[0] == found.held[1]
        assert found.quantized == {4 if scaling == "tensor" else 3}  # for each step, and for the last evaluation


def step_of(scaling: str, zero: int) -> tuple[Bytes, Bytes, list[int], list[Any]]:
    """Of a training step: bytes of gathers planned and on the wire, sizes of all-reduces, events of scales."""
    model = made(scaling, zero, keep_resident=False)
    reduced: list[int] = []
    all_reduce = dist.all_reduce

    def combined(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(value.numel() * value.itemsize)
        return all_reduce(value, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", combined):
        planned, wire, _ = gathered(model, this_ranks_tokens(0), ())
    return planned, wire, reduced, [event for _, event in model.schedule.of(Kind.SCALES)]


@pytest.mark.shows("F3", "F5")
@pytest.mark.parametrize(("scaling", "zero"), [("tensor", 3), thorough("row", 3), thorough("row", 1)])
def test_one_collective_for_scales_and_the_bytes_that_were_planned(ranks: Pool, scaling: str, zero: int) -> None:
    for planned, wire, reduced, events in ranks(2, step_of, scaling, zero):
        assert planned == wire
        (event,) = events
        assert reduced == [event.bytes]
        assert len(event.params) == 2 and event.phase is Phase.FORWARD


def bytes_gathered(zero: int) -> list[int]:
    """By the linears' buckets in a step: in bf16, and in float8 with each scaling."""
    found = []
    for precision in (
        fxshard.Precision(param=BF16, reduce=torch.float32),
        *(fxshard.Float8(scaling=scaling, smallest=0) for scaling in ("tensor", "row", "block")),
    ):
        x = torch.zeros(2, 8, dtype=torch.int64)
        planned = fxshard.plan(
            single(2),
            (x, x),
            world_size=2,
            zero=zero,
            precision=precision,
            lowering="eager",
            debug=fxshard.Debug(keep_resident=False),
        )
        events = [event for _, event in planned.of(Kind.UNSHARD)]
        found.append(sum(e.bytes for e in events if any(name.endswith("up.weight") for name in e.params)))
    return found


@pytest.mark.shows("F5")
def test_gathers_move_half_of_what_bf16_does() -> None:
    plain, *quantized = bytes_gathered(3)
    assert all(each <= 0.53 * plain for each in quantized)


class Unsharded:
    """The model with fp32 masters in one process: each rank's tokens one after the other, gradients averaged."""

    def __init__(self, scaling: str, optimizer: Any) -> None:
        self.model = single()
        for layer in self.model.layers:  # type: ignore[union-attr]
            for name in ("up", "down"):
                setattr(layer, name, reference.ByHand(getattr(layer, name), scaling, "fp8"))
        self.optimizer = optimizer(self.model.parameters())

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        cast = {
            name: p if name.endswith(("up.weight", "down.weight")) else p.to(BF16)
            for name, p in self.model.named_parameters()
        }
        return torch.func.functional_call(self.model, cast, (x, y))  # type: ignore[no-any-return]

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]], clip: float | None = None) -> float:
        losses = [self.loss(x, y) for x, y in batches]
        for loss in losses:
            (loss.double() / len(losses)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(sum(loss.detach().double() for loss in losses) / len(losses))


def plain_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=EPS, weight_decay=ADAMW.weight_decay)


def against_unsharded(scaling: str, mode: str) -> tuple[list[float], list[float]]:
    """Losses of training and of evaluation, sharded and in one process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2, ranks // 2))} if mode == "hsdp" else {}
    model, whole = made(scaling, 3, **options), Unsharded(scaling, plain_adamw)
    clip, micro = (None, 1) if mode == "hsdp" else (0.05, 2)
    mine, theirs = [], []
    for step in range(3):
        numbers = [step * micro + i for i in range(micro)]
        losses = []
        for k, number in enumerate(numbers):
            last = k == micro - 1
            x, y = batch(number, ranks, rank, VOCAB, size=3, length=12)
            if last:
                loss = model(x, y)
                (loss / micro).backward()
            else:
                with model.no_sync():
                    loss = model(x, y)
                    (loss / micro).backward()
            losses.append(mean_over_ranks(loss))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        model.optimizer.step()
        model.optimizer.zero_grad()
        mine.append(sum(losses) / len(losses))
        every = [batch(number, ranks, other, VOCAB, size=3, length=12) for number in numbers for other in range(ranks)]
        theirs.append(whole.step(every, clip))
        if mode == "hsdp":
            continue
        with torch.no_grad():
            x, y = batch(99, 1, 0, VOCAB, size=3, length=12)
            mine.append(float(model(x, y)))
            theirs.append(float(whole.loss(x, y)))
    return mine, theirs


@pytest.mark.shows("F7")
@pytest.mark.parametrize(
    ("scaling", "mode", "ranks_"),
    [thorough("row", "clip and accumulate", 2), thorough("tensor", "hsdp", 4)],
)
def test_losses_are_those_of_the_unsharded_model(ranks: Pool, scaling: str, mode: str, ranks_: int) -> None:
    for mine, theirs in ranks(ranks_, against_unsharded, scaling, mode):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-6)
        assert mine == pytest.approx(theirs, rel=1e-5)


def with_muon(zeros: list[int]) -> list[tuple[Run, ...]]:
    muon = fxshard.Muon(lr=1e-2, adamw=ADAMW)
    return [
        tuple(trained(made("tensor", zero, gather, optimizer=muon), evaluated=False) for gather in ("bf16", "fp8"))
        for zero in zeros
    ]


@pytest.mark.shows("F7")
@pytest.mark.parametrize("zeros", [thorough([3]), thorough([1])])
def test_muon_in_float8(ranks: Pool, zeros: list[int]) -> None:
    for pairs in ranks(2, with_muon, zeros):
        for off, on in pairs:
            assert on.same(off) and len(set(on.losses)) == 3


def what_is_not_finite() -> str:
    model = made("tensor", 3)
    trained(model, steps=1, evaluated=False)
    state = model.full_state_dict()
    state["layers.0.up.weight"][5, 5] = torch.inf
    model.load_state_dict(state)
    try:
        model(*this_ranks_tokens(0))
    except fxshard.StateError as error:
        return str(error)
    return ""


def test_weights_that_are_not_finite_are_named_on_every_rank(ranks: Pool) -> None:
    for message in ranks(2, what_is_not_finite):
        assert "weights of layers.0" in message and "are not finite" in message


def in_precision(precision: fxshard.Precision) -> fxshard.ShardedModule:
    return fxshard.compile(single(), zero=3, precision=precision, lowering="eager", optimizer=ADAMW)


def one_step(model: fxshard.ShardedModule, step: int) -> float:
    loss = train_step(model, *this_ranks_tokens(step))
    return mean_over_ranks(loss)


def between_precisions(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """Float8 saved, loaded in bf16, saved again and loaded in float8; next to the run that was never interrupted."""
    float8, bf16 = fxshard.Float8(smallest=0), fxshard.Precision(param=BF16, reduce=torch.float32)
    straight = in_precision(float8)
    one_step(straight, 0)
    fxshard.save(straight, folder / "float8")
    plain = in_precision(bf16)
    fxshard.load(plain, folder / "float8")
    assert abs(float(plain(*this_ranks_tokens(1))) - float(straight(*this_ranks_tokens(1)))) < 0.05
    fxshard.save(plain, folder / "bf16")
    again = in_precision(float8)
    fxshard.load(again, folder / "bf16")
    losses = [one_step(model, 1) for model in (straight, again)]
    return straight.full_state_dict(), again.full_state_dict(), losses


@pytest.mark.shows("F6")
def test_a_checkpoint_goes_to_bf16_and_back(ranks: Pool, tmp_path: Path) -> None:
    for straight, again, losses in ranks(2, between_precisions, tmp_path):
        assert losses[0] == losses[1]
        assert all(torch.equal(value, again[name]) for name, value in straight.items())
