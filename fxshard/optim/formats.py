"""Moments in fewer bits: how values become codes and back, in plain torch.

bf16    rounded at random, up or down with the probabilities that make it right on average. An average that moves by a
        thousandth of itself in a step would never move if it were rounded to the nearest.
8bit    a code for each element and an fp32 scale, the largest magnitude, for each block. Codes are small floats
        between 0 and 1: ``steps`` equal steps from each power of two to the next, equal steps below 2⁻⁷, and 1 itself.
        A first moment has 16 steps and a sign. A second moment has none, 32 steps, and codes of its root: its values
        reach from the scale down to 2⁻²² of it, and none but zero becomes zero, because a step divides by it.
        Rounded at random as well; the second moment so that it is right on average, not its root.

Noise comes from the parameter's name, the number of the step and the element's place in the whole parameter. So a run
that is resumed, on any number of ranks, has the bits of one that was not. Values that a code stands for are given that
code again (``nearest``): a checkpoint holds fp32 and loses nothing. ``packed_kernels`` is the same on a GPU.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
import torch.nn.functional as F

from fxshard.planner.state import BLOCK, line_blocks

BINADES = 7
"""Powers of two below 1 from which on steps are equal."""
STEPS = {True: 16, False: 32}
"""Steps of codes with a sign and without."""
SMALLEST_SCALE = 2.0**-88
"""Smaller blocks have it too: decoded values are then never below the normal numbers of fp32, in either moment."""
_MASK = 0xFFFFFFFF
Bits = TypeVar("Bits", int, torch.Tensor)


@dataclass(frozen=True)
class Noise:
    """The random numbers of stochastic rounding: 32 bits for each element, 16 for either moment."""

    seed: int
    first: int
    """Where in the whole parameter the first element stands."""

    @classmethod
    def of(cls, name: str, step: int, first: int) -> Noise:
        return cls(_mixed(zlib.crc32(name.encode()) + 0x9E3779B9 * step & _MASK), first & _MASK)

    def draw(self, numel: int, device: torch.device, *, second: bool) -> torch.Tensor:
        """Whole numbers from 0 to 2¹⁶ − 1, one for each element."""
        place = torch.arange(self.first, self.first + numel, dtype=torch.int64, device=device) & _MASK
        x = _mixed(place ^ self.seed)
        return x >> 16 if second else x & 0xFFFF


def _mixed(x: Bits) -> Bits:
    """32 bits, or a tensor of such, of which each depends on all that were given."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


# -- bf16 --------------------------------------------------------------------------------------------------------------


def rounded_bf16(values: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """fp32 as bf16: what lies between two of its numbers becomes the upper one as often as it lies above the lower.

    ``noise``: 16 bits for each element; without it, to the nearest.
    """
    if noise is None:
        return values.to(torch.bfloat16)
    bits = values.view(torch.int32)
    cut = ((bits + noise.to(torch.int32)) & -0x10000).view(torch.float32)
    # What is infinite or no number stays that; what is finite does.
    cut = torch.where(cut.isfinite(), cut, (bits & -0x10000).view(torch.float32))
    return torch.where(values.isfinite(), cut, values).to(torch.bfloat16)


# -- 8 bits ------------------------------------------------------------------------------------------------------------


def encoded(values: torch.Tensor, line: int, noise: torch.Tensor | None, *, signed: bool) -> tuple[torch.Tensor, ...]:
    """(codes, scales) of flat fp32 values that are whole lines. Without ``noise``, to the nearest.

    Of a block that is not finite, the scale is no number, and so is all that its codes stand for.
    """
    blocks = _blocks(values, line)
    largest = blocks.abs().amax(dim=-1)
    scales = torch.where(largest.isfinite(), largest.clamp(min=SMALLEST_SCALE), torch.nan)
    ratio = blocks.abs() / scales.unsqueeze(-1)
    if not signed:
        ratio = ratio.sqrt()
    ratio = torch.where(ratio.isfinite(), ratio, 0.0)
    drawn = 0.5 if noise is None else _blocks(noise, line) * 2.0**-16
    codes = _magnitudes(ratio, drawn, STEPS[signed], signed=signed)
    if signed:
        codes = codes + 128 * ((blocks < 0) & (codes > 0))
    return _flat(codes.to(torch.uint8), line), scales.reshape(-1)


def decoded(codes: torch.Tensor, scales: torch.Tensor, line: int, *, signed: bool) -> torch.Tensor:
    """The fp32 values that codes stand for."""
    table = levels(signed).to(codes.device)
    return _flat(_blocks(table[codes.long()], line) * scales.view(-1, line_blocks(line), 1), line)


@cache
def levels(signed: bool) -> torch.Tensor:
    """The values of the 256 codes, in units of the scale. All of them are exact in fp32."""
    steps = STEPS[signed]
    place = torch.arange(256 if not signed else 128) + 1  # the step next to zero is left out: 1 itself needs a code
    binade = (place // steps).clamp(min=1)
    level = torch.ldexp((place - (binade - 1) * steps).float(), binade - 1 - BINADES - (steps.bit_length() - 1))
    level[0] = 0.0
    return torch.cat([level, -level]) if signed else level * level


def _magnitudes(ratio: torch.Tensor, drawn: torch.Tensor | float, steps: int, *, signed: bool) -> torch.Tensor:
    """Codes of magnitudes between 0 and 1."""
    exponent = torch.frexp(ratio.clamp(min=2.0**-BINADES))[1] - 1
    t = torch.ldexp(ratio, steps.bit_length() - 1 - exponent)  # in steps of its binade
    low = torch.where(t < 2, 0.0, t.floor())
    high = torch.where(t < 2, 2.0, low + 1)
    if signed:
        up = drawn < (t - low) / (high - low)
    else:  # as often as makes the square right on average, and nothing becomes zero
        up = (drawn < (t - low) * (t + low) / ((high - low) * (high + low))) | ((low == 0) & (t > 0))
    place = steps * (exponent + BINADES) + torch.where(up, high, low).int()
    return (place - 1).clamp(min=0)


def _blocks(flat: torch.Tensor, line: int) -> torch.Tensor:
    """(lines, blocks, elements); the last block of a line is filled up with zeros."""
    blocks = line_blocks(line)
    return F.pad(flat.view(-1, line), (0, blocks * BLOCK - line)).view(-1, blocks, BLOCK)


def _flat(blocks: torch.Tensor, line: int) -> torch.Tensor:
    return blocks.flatten(1)[:, :line].reshape(-1)
