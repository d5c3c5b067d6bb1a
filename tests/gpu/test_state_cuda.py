"""Optimizer state in fewer bits and on the host of a GPU: kernels against their definition, streams, memory."""

from __future__ import annotations

import math
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fxshard
from fxshard.optim.formats import Noise
from fxshard.optim.packed import Numbers, Stored, adamw_
from fxshard.planner import optimizer_step as planned_step
from fxshard.planner.state import moment_bytes
from tests.gpu.waiting import no_waiting
from tests.optim.state_reference import LINES, Kinds, drawn, eight_bits, expected
from tests.stack import wide
from tests.training import deliver, random_gradients

pytestmark = pytest.mark.gpu
LR = 1e-2
SHAPES = [(24, 300), (7, 64), (5, 1024), (3, 10, 300), (1, 4096), (513, 768)]


def stored(shape: tuple[int, ...], format: str, device: str) -> list[Stored]:
    numel = math.prod(shape)
    size = moment_bytes(numel, shape, format)
    return [
        Stored.cut(torch.zeros(size, dtype=torch.uint8, device=device), numel, shape, format, signed=signed)
        for signed in (True, False)
    ]


def equal(mine: list[Stored], theirs: list[Stored]) -> bool:
    pairs = [pair for a, b in zip(mine, theirs, strict=True) for pair in zip(a.tensors, b.tensors, strict=True)]
    return all(torch.equal(a.cpu(), b) for a, b in pairs)


@pytest.mark.shows("M5")
@pytest.mark.parametrize(("format", "shape"), list(product(("bf16", "8bit"), SHAPES)))
@pytest.mark.parametrize("on_device", [False, True])
def test_state_of_the_kernel_is_that_of_the_definition(format: str, shape: tuple[int, ...], on_device: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    numel = math.prod(shape)
    here, there = stored(shape, format, "cpu"), stored(shape, format, "cuda")
    param = torch.randn(numel, generator=generator)
    copied = param.cuda()
    lr: Any = torch.tensor(LR, device="cuda") if on_device else LR
    group = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    for step in range(1, 9):
        grad = torch.randn(numel, generator=generator) * (2 * torch.randn(numel, generator=generator)).exp()
        noise = Noise.of("w", step, 12345)
        adamw_(param, grad, here[0], here[1], noise, Numbers.of(group, step, param.device))
        numbers = Numbers.of({**group, "lr": lr}, step, copied.device)
        adamw_(copied, grad.cuda(), there[0], there[1], noise, numbers)
        # The kernel multiplies and adds in one rounding, and a lr on the device is divided by 1 − β₁ᵗ there.
        assert torch.allclose(copied.cpu(), param, rtol=1e-5, atol=1e-6), step
        assert equal(there, here), step


@pytest.mark.parametrize(("format", "shape"), list(product(("bf16", "8bit"), SHAPES)))
def test_reading_and_writing_are_the_definition(format: str, shape: tuple[int, ...]) -> None:
    for signed, noise in product((True, False), (None, Noise.of("w", 3, 7))):
        generator = torch.Generator().manual_seed(0)
        values = (3 * torch.randn(math.prod(shape), generator=generator)).exp()
        values = values * torch.randn(values.shape, generator=generator).sign() if signed else values
        here, there = stored(shape, format, "cpu")[not signed], stored(shape, format, "cuda")[not signed]
        here.write_(values, noise)
        there.write_(values.cuda(), noise)
        assert equal([there], [here]) and torch.equal(there.read().cpu(), here.read())
        refused = torch.ones((), device="cuda")
        there.write_(values.cuda() * 2, noise or Noise(0, 0), refused)
        assert equal([there], [here])


def gradients(seed: int) -> dict[str, torch.Tensor]:
    return {name: grad.cuda() for name, grad in random_gradients(Kinds(), seed).items()}


def train(model: fxshard.ShardedModule, seeds: range) -> dict[str, torch.Tensor]:
    for seed in seeds:
        deliver(model, gradients(seed))
        model.optimizer.step()
        model.optimizer.zero_grad()
    return model.full_state_dict()


def made(**options: Any) -> fxshard.ShardedModule:
    return fxshard.shard(Kinds().cuda(), optimizer=fxshard.AdamW(lr=LR, **options))


@pytest.mark.shows("M5")
@pytest.mark.parametrize(("format", "place"), list(product(("bf16", "8bit"), ("none", "host"))))
def test_follows_its_reference(format: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxshard.optim.moments.PIECE_NUMEL", 400)
    found, wanted = train(made(state=format, offload=place), range(6)), expected(format, range(6), nearest_root=True)
    for name, reference in wanted.items():
        mine = found[name].numpy().reshape(-1)
        if format == "8bit" and not LINES[name]:
            assert np.allclose(mine, reference.p, rtol=1e-4, atol=1e-5), name
        else:
            assert np.array_equal(mine, reference.p), name


def large(offload: str, format: str) -> fxshard.ShardedModule:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    return fxshard.shard(model, optimizer=fxshard.AdamW(lr=LR, state=format, offload=offload))


@pytest.mark.shows("M5")
@pytest.mark.parametrize("format", ["fp32", "bf16", "8bit"])
def test_pieces_on_their_way_do_not_disturb_each_other(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, several steps without a wait in between: the same bits as on the device."""
    monkeypatch.setattr("fxshard.optim.moments.PIECE_NUMEL", 2**18)
    monkeypatch.setattr(planned_step, "ADAMW_NUMEL", 2**23)
    results = []
    for place in ("none", "host"):
        model = large(place, format)
        for seed in range(6):
            torch.manual_seed(seed)
            grads = {name: torch.randn(p.shape, device="cuda") for name, p in model.named_parameters()}
            deliver(model, grads)
            model.optimizer.step()
        state = model.optimizer.state_dict()["state"]
        found = {f"{i}.{field}": v.cpu() for i, fields in state.items() for field, v in fields.items()}
        results.append({**model.full_state_dict(), **found})
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_the_device_holds_no_moments_and_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxshard.optim.moments.PIECE_NUMEL", 2**20)
    monkeypatch.setattr(planned_step, "ADAMW_NUMEL", 1)  # as a large model: one bucket after another
    before = torch.cuda.memory_allocated()
    model = large("host", "fp32")
    deliver(model, {name: torch.randn(p.shape, device="cuda") for name, p in model.named_parameters()})
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    weights = sum(p.numel() for p in model.parameters()) * 4
    assert held - before < 2.2 * weights  # parameters and gradients
    torch.cuda.reset_peak_memory_stats()
    model.optimizer.step()
    assert torch.cuda.max_memory_allocated() - held < 4 * 2**20 * 8
    assert model.bytes_at_rest()["host"] == 2 * weights
    memory = next(iter(model.optimizer._moments.values())).memory  # type: ignore[attr-defined]
    assert memory.device.type == "cpu" and memory.is_pinned()


@pytest.mark.parametrize(("format", "place"), [("bf16", "none"), ("8bit", "none"), ("8bit", "host")])
def test_nothing_waits(format: str, place: str) -> None:
    for nan in (None, "raise"):
        model = made(state=format, offload=place, nan=nan)
        train(model, range(1))  # the first one sends tables to the device and compiles
        deliver(model, gradients(1))
        with no_waiting():
            model.optimizer.step()


@pytest.mark.parametrize(("format", "place"), [("bf16", "none"), ("8bit", "none"), ("8bit", "host"), ("fp32", "host")])
def test_a_refused_step_changes_no_bit(format: str, place: str) -> None:
    model, other = (made(state=format, offload=place, nan="skip") for _ in range(2))
    train(model, range(1))
    bad = gradients(7)
    bad["ragged"][2, 5] = math.inf
    deliver(model, bad)
    model.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = train(model, range(1, 3))
        assert model.optimizer.skipped_steps == 1
    wanted = train(other, range(3))
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)


@pytest.mark.shows("M5")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_convert(tmp_path: Path, asynchronous: bool) -> None:
    model = made(state="8bit", offload="host")
    train(model, range(2))
    fxshard.save(model, tmp_path / "a", asynchronous=asynchronous).wait()
    onward = train(model, range(2, 4))
    for format, place in (("8bit", "none"), ("8bit", "host"), ("bf16", "host"), ("fp32", "none"), ("fp32", "host")):
        loaded = made(state=format, offload=place)
        fxshard.load(loaded, tmp_path / "a")
        after = train(loaded, range(2, 4))
        if format == "8bit":
            assert all(torch.equal(after[name], onward[name]) for name in onward), place
        else:
            assert all(torch.allclose(after[name], onward[name], atol=0.02) for name in onward), (format, place)


@pytest.mark.shows("M5")
@pytest.mark.parametrize("place", ["none", "host"])
def test_muons_momentum_follows_its_reference(place: str) -> None:
    """Muon over plain tensors of the GPU, whose momentum is rounded by the reference after every step."""
    plain = wide().cuda()
    optimizer = fxshard.Muon(lr=LR).build(plain)
    model = fxshard.shard(wide().cuda(), optimizer=fxshard.Muon(lr=LR, state="8bit", offload=place))
    for step in range(3):
        grads = {name: grad.cuda() for name, grad in random_gradients(wide(), step).items()}
        for name, grad in grads.items():
            plain.get_parameter(name).grad = grad
        optimizer.step()
        for name, parameter in plain.named_parameters():
            buffer = optimizer.state[parameter].get("momentum_buffer")
            if buffer is not None:
                chance = drawn(name, step + 1, parameter.numel(), False)
                rounded = eight_bits(buffer.cpu().numpy().reshape(-1), parameter.shape[-1], True, chance)
                buffer.copy_(torch.from_numpy(rounded).view_as(parameter))
        deliver(model, grads)
        model.optimizer.step()
    found = model.full_state_dict()
    matrices = {name: p.detach().cpu() for name, p in plain.named_parameters() if p.ndim == 2}
    assert all(torch.equal(found[name], value) for name, value in matrices.items())
