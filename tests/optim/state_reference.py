"""AdamW with moments in fewer bits, written from the description alone: numpy, tables of all codes, and searches."""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np
import torch
from torch import nn

from tests.training import random_gradients

F32 = np.float32
SMALLEST = F32(2.0**-88)


class Kinds(nn.Module):
    """A parameter of every kind: long and short rows, rows that are no multiple of a block, a single one, experts,
    vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ragged = nn.Parameter(torch.randn(5, 300))
        self.short = nn.Parameter(torch.randn(9, 64))
        self.experts = nn.Parameter(torch.randn(3, 4, 70))
        self.conv = nn.Parameter(torch.randn(6, 8, 3, 3))
        self.narrow = nn.Parameter(torch.randn(7, 5))
        self.bias = nn.Parameter(torch.randn(300))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 80))


LINES = {"ragged": 300, "short": 64, "experts": 70, "conv": 72, "narrow": 0, "bias": 0, "scale": 0, "row": 80}
"""Elements that blocks are cut out of; 0: kept in fp32."""


@cache
def table(signed: bool) -> np.ndarray:
    """All magnitudes that there are codes for, in units of the scale."""
    steps = 16 if signed else 32
    found = {0.0, 1.0} | {i / steps / 2**7 for i in range(2, steps)}
    found |= {2.0**-binade * (1 + i / steps) for binade in range(1, 8) for i in range(steps)}
    assert len(found) == (128 if signed else 256)
    return np.array(sorted(found))


def noise(name: str, step: int, index: int) -> int:
    """32 bits, in Python's whole numbers."""

    def mixed(x: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            x = (x ^ (x >> shift)) * factor % 2**32
        return x

    return mixed(index ^ mixed((zlib.crc32(name.encode()) + 0x9E3779B9 * step) % 2**32))


@cache
def drawn(name: str, step: int, numel: int, second: bool) -> np.ndarray:
    bits = np.array([noise(name, step, i) for i in range(numel)], dtype=np.int64)
    return (bits >> 16 if second else bits % 2**16) / 2**16


def eight_bits(values: np.ndarray, line: int, signed: bool, chance: np.ndarray | None) -> np.ndarray:
    """What the codes of values stand for; ``chance``: numbers from 0 to 1 to round by, else to the nearest."""
    out = np.empty_like(values)
    levels = table(signed)
    for start in range(0, len(values), line):
        for begin in range(start, start + line, 256):
            where = slice(begin, min(begin + 256, start + line))
            block = values[where]
            scale = max(np.abs(block).max(), SMALLEST)
            ratio = (np.abs(block) / scale).astype(F32)
            ratio = ratio.astype(float) if signed else np.sqrt(ratio).astype(float)
            low = np.searchsorted(levels, ratio, side="right") - 1
            high = np.minimum(low + 1, len(levels) - 1)
            power = 1 if signed else 2
            part = ratio**power - levels[low] ** power
            gap = np.where(high > low, levels[high] ** power - levels[low] ** power, 1.0)
            up = part / gap > (0.5 if chance is None else chance[where])
            if not signed:
                up |= (low == 0) & (ratio > 0)
            level = (levels[np.where(up, high, low)] ** power).astype(F32)
            out[where] = np.where(block < 0, -level, level) * scale
    return out


def bf16(values: np.ndarray, chance: np.ndarray | None) -> np.ndarray:
    """The number of bf16 below or above in magnitude."""
    if chance is None:
        return torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    size = np.abs(values)
    low = (size.view(np.uint32) & 0xFFFF0000).view(F32)
    high = ((size.view(np.uint32) & 0xFFFF0000) + 0x10000).view(F32)
    up = (size.astype(float) - low) / (high.astype(float) - low) > 1 - chance - 2.0**-17
    return np.where(values < 0, -1, 1).astype(F32) * np.where(up, high, low)


def kept(values: np.ndarray, format: str, line: int, signed: bool, chance: np.ndarray | None) -> np.ndarray:
    if format == "bf16":
        return bf16(values, chance)
    return eight_bits(values, line, signed, chance) if format == "8bit" and line else values


class Reference:
    """One parameter under AdamW."""

    def __init__(self, name: str, value: torch.Tensor, format: str, line: int, nearest_root: bool = False) -> None:
        self.name, self.format, self.line, self.step = name, format, line, 0
        self.nearest_root = nearest_root
        self.p = value.detach().numpy().reshape(-1).copy()
        self.m, self.v = np.zeros_like(self.p), np.zeros_like(self.p)

    def update(self, grad: torch.Tensor, lr: float, decay: float = 1e-2, eps: float = 1e-8) -> None:
        g, self.step = grad.numpy().reshape(-1), self.step + 1
        m = self.m + (g - self.m) * F32(1 - 0.9)
        v = self.v * F32(0.999) + g * g * F32(1 - 0.999)
        # On x86 CPUs torch's root is not always the nearest number; a GPU's is.
        root = np.sqrt(v) if self.nearest_root else torch.from_numpy(v).sqrt().numpy()
        spread = root / F32((1 - 0.999**self.step) ** 0.5) + F32(eps)
        self.p = self.p * F32(1 - lr * decay) - m / spread * F32(lr / (1 - 0.9**self.step))
        draws = [drawn(self.name, self.step, len(g), second) for second in (False, True)]
        self.m = kept(m, self.format, self.line, True, draws[0])
        self.v = kept(v, self.format, self.line, False, draws[1])


def expected(format: str, seeds: range, lr: float = 1e-2, nearest_root: bool = False) -> dict[str, Reference]:
    """All parameters of ``Kinds`` after steps with the gradients of these seeds."""
    made = {name: Reference(name, p, format, LINES[name], nearest_root) for name, p in Kinds().named_parameters()}
    for seed in seeds:
        for name, grad in random_gradients(Kinds(), seed).items():
            made[name].update(grad, lr)
    return made
