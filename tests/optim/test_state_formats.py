"""Moments in fewer bits: codes against tables of all of them, rounding at random, and nothing lost on the way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxshard.optim.formats import Noise, decoded, encoded, levels, rounded_bf16
from fxshard.optim.packed import Numbers, Stored, adamw_
from fxshard.planner.state import line_numel, moment_bytes
from tests.optim import state_reference as reference

LINE = 300


def spread(seed: int, signed: bool, exponent: float = 0.0) -> torch.Tensor:
    """Values over many orders of magnitude, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    size = (4 * torch.randn(4 * LINE, generator=generator)).exp() * 2.0**exponent
    size[torch.rand(size.shape, generator=generator) < 0.05] = 0.0
    return torch.where(torch.rand(size.shape, generator=generator) < 0.5, -size, size) if signed else size


@pytest.mark.shows("M5")
@pytest.mark.parametrize("signed", [True, False])
def test_codes_stand_for_the_levels_that_were_described(signed: bool) -> None:
    found = levels(signed)[: 128 if signed else 256].double().numpy()
    assert np.array_equal(found, reference.table(signed) ** (1 if signed else 2))
    assert not signed or torch.equal(levels(True)[128:], -levels(True)[:128])


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("drawn", [True, False])
def test_values_become_what_the_reference_makes_of_them(signed: bool, drawn: bool) -> None:
    for seed in range(5):
        values, noise = spread(seed, signed), Noise.of("w", seed, 0)
        bits = noise.draw(len(values), values.device, second=not signed) if drawn else None
        made = decoded(*encoded(values, LINE, bits, signed=signed), LINE, signed=signed)
        chance = reference.drawn("w", seed, len(values), not signed) if drawn else None
        assert np.array_equal(made.numpy(), reference.eight_bits(values.numpy(), LINE, signed, chance))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.floats(-130, 110))
@example(seed=0, signed=False, exponent=-149.0)
@example(seed=0, signed=True, exponent=-149.0)
def test_what_codes_stand_for_gets_the_same_codes(seed: int, signed: bool, exponent: float) -> None:
    """So fp32 in a checkpoint loses nothing, wherever the values lie."""
    values = spread(seed, signed, exponent).clamp(-3e38, 3e38)
    codes, scales = encoded(values, LINE, Noise(seed, 0).draw(len(values), values.device, second=False), signed=signed)
    again = encoded(decoded(codes, scales, LINE, signed=signed), LINE, None, signed=signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


def test_no_second_moment_becomes_zero_and_none_grows_beyond_its_block() -> None:
    values = torch.tensor([1.0, 1e-9, 1e-20, 0.0] + [0.0] * 60)
    for seed in range(50):
        bits = Noise(seed, 0).draw(64, values.device, second=True)
        made = decoded(*encoded(values, 64, bits, signed=False), 64, signed=False)
        assert made[0] == 1 and made[3] == 0 and (made[1:3] == 2.0**-22).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_block_that_is_not_finite_is_no_number(value: float) -> None:
    values = spread(0, True)
    values[5] = value
    made = decoded(*encoded(values, LINE, None, signed=True), LINE, signed=True)
    assert made[:256].isnan().all() and made[256:].isfinite().all()
    assert rounded_bf16(values, torch.full_like(values, 0xFFFF))[:6].isfinite().tolist() == [True] * 5 + [False]


@pytest.mark.parametrize("format", ["bf16", "first", "second"])
def test_rounding_is_right_on_average(format: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(64, generator=generator) + 0.01
    total, draws = torch.zeros(64, dtype=torch.float64), 4000 if format == "bf16" else 1000
    for step in range(draws):
        noise = Noise.of("w", step, 0).draw(64, values.device, second=format == "second")
        if format == "bf16":
            total += rounded_bf16(values, noise)
        else:
            signed = format == "first"
            total += decoded(*encoded(values, 64, noise, signed=signed), 64, signed=signed)
    error = ((total / draws - values) / values).abs()
    gap = {"bf16": 2.0**-7, "first": 2.0**-4, "second": 2.0**-4}[format]  # between neighbours, relative
    assert error.max() < 5 * gap / 2 / math.sqrt(draws)
    nearest = values.to(torch.bfloat16).float() if format == "bf16" else None
    assert nearest is None or error.max() < ((nearest - values) / values).abs().max() / 10


def test_noise_depends_on_the_place_in_the_parameter_alone() -> None:
    whole = Noise.of("layers.0.weight", 7, 0).draw(1000, torch.device("cpu"), second=True)
    rest = Noise.of("layers.0.weight", 7, 600).draw(400, torch.device("cpu"), second=True)
    assert torch.equal(whole[600:], rest)
    assert whole.tolist()[:50] == [reference.noise("layers.0.weight", 7, i) >> 16 for i in range(50)]
    assert not torch.equal(whole, Noise.of("layers.0.weight", 8, 0).draw(1000, torch.device("cpu"), second=True))


@pytest.mark.shows("M5")
@pytest.mark.parametrize("format", ["bf16", "8bit"])
def test_steps_are_the_references_bit_by_bit(format: str) -> None:
    shape = (4, LINE)
    numel = 4 * LINE
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(numel, generator=generator)
    expected = reference.Reference("w", param, format, LINE)
    size = moment_bytes(numel, shape, format)
    one, two = (Stored.cut(torch.zeros(size, dtype=torch.uint8), numel, shape, format, signed=s) for s in (True, False))
    group = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    for step in range(1, 21):
        grad = torch.randn(numel, generator=generator) * (2 * torch.randn(numel, generator=generator)).exp()
        expected.update(grad, 1e-2)
        adamw_(param, grad, one, two, Noise.of("w", step, 0), Numbers.of(group, step, param.device))
        assert np.array_equal(param.numpy(), expected.p), step
        assert np.array_equal(one.read().numpy(), expected.m) and np.array_equal(two.read().numpy(), expected.v), step


def test_lines_are_those_of_the_last_dimension_that_is_long_enough() -> None:
    shapes = {name: tuple(p.shape) for name, p in reference.Kinds().named_parameters()}
    assert {name: line_numel(shape) for name, shape in shapes.items()} == reference.LINES
