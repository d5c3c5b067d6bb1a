# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""Moments in fewer bits on a GPU: what ``formats`` and ``packed`` define, in one pass over memory, in Triton.

A program has some blocks of 256 elements of one parameter's rows: it decodes both moments, makes AdamW's step, finds
the largest magnitudes of the new moments and encodes them. Every operation is rounded by itself, as torch's are one
after another, so the bits are those of the definition. Kernels take ``refused``, a number on the device: unless it is
zero they leave everything as it was.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.optim.formats import BINADES, SMALLEST_SCALE, STEPS, Noise
from fxshard.planner.state import BLOCK, line_blocks

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # torch for the CPU comes without Triton
    HAS_TRITON = False

_ROWS = 16
"""Blocks that a program has: 4096 elements."""
_WARPS = 8
MOST_NUMEL = 2**31 - 2**16
"""Kernels count elements in 32 bits."""


if HAS_TRITON:

    @triton.jit
    def _noise(seed, place):
        x = place.to(tl.uint32) ^ seed.to(tl.uint32)
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def _power(exponent):
        return ((exponent + 127) << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def _decode(code, scale, SIGNED: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, BINADES: tl.constexpr):
        code = code.to(tl.int32)
        magnitude = code & 127 if SIGNED else code
        place = magnitude + 1
        binade = tl.maximum(place // STEPS, 1)
        level = (place - (binade - 1) * STEPS).to(tl.float32) * _power(binade - 1 - BINADES - BITS)
        level = tl.where(magnitude == 0, 0.0, level)
        if SIGNED:
            level = tl.where(code > 127, -level, level)
        else:
            level = level * level
        return level * scale

    @triton.jit
    def _encode(
        value, drawn, inside, SIGNED: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, BINADES: tl.constexpr,
        SMALLEST: tl.constexpr,
    ):  # fmt: skip
        value = tl.where(inside, value, 0.0)
        size = tl.abs(value)
        # A largest magnitude does not pass on what is no number, so that is looked for apart.
        wrong = tl.max((size - size != 0.0).to(tl.int32), axis=1)
        scale = tl.where(wrong > 0, float("nan"), tl.maximum(tl.max(size, axis=1), SMALLEST))
        ratio = tl.div_rn(size, scale[:, None] + tl.zeros_like(size))
        if not SIGNED:
            ratio = tl.sqrt_rn(ratio)
        ratio = tl.where(wrong[:, None] > 0, 0.0, ratio)
        exponent = tl.maximum((ratio.to(tl.int32, bitcast=True) >> 23) - 127, -BINADES)
        t = ratio * _power(BITS - exponent)
        low = tl.where(t < 2.0, 0.0, tl.floor(t))
        high = tl.where(t < 2.0, 2.0, low + 1.0)
        if SIGNED:
            up = drawn < tl.div_rn(t - low, high - low)
        else:
            chance = tl.div_rn((t - low) * (t + low), (high - low) * (high + low))
            up = (drawn < chance) | ((low == 0.0) & (t > 0.0))
        code = tl.maximum(STEPS * (exponent + BINADES) + tl.where(up, high, low).to(tl.int32) - 1, 0)
        if SIGNED:
            code = tl.where((value < 0.0) & (code > 0), code + 128, code)
        return code.to(tl.uint8), scale

    @triton.jit
    def _round_bf16(value, noise):
        bits = value.to(tl.int32, bitcast=True)
        cut = ((bits + noise.to(tl.int32)) & -0x10000).to(tl.float32, bitcast=True)
        cut = tl.where(cut - cut == 0.0, cut, (bits & -0x10000).to(tl.float32, bitcast=True))
        return tl.where(value - value == 0.0, cut, value).to(tl.bfloat16)

    @triton.jit
    def _load(
        values, scales, block, where, inside, count, CODES: tl.constexpr, SIGNED: tl.constexpr, STEPS: tl.constexpr,
        BITS: tl.constexpr, BINADES: tl.constexpr,
    ):  # fmt: skip
        stored = tl.load(values + where, mask=inside, other=0)
        if CODES:
            scale = tl.load(scales + block, mask=block < count, other=0.0)
            return _decode(stored, scale[:, None], SIGNED, STEPS, BITS, BINADES)
        else:
            return stored.to(tl.float32)

    @triton.jit
    def _store(
        value, values, scales, noise, block, where, inside, count, CODES: tl.constexpr, NEAREST: tl.constexpr,
        SIGNED: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, BINADES: tl.constexpr, SMALLEST: tl.constexpr,
    ):  # fmt: skip
        if CODES:
            drawn = noise.to(tl.float32) * (1.0 / 65536.0)
            if NEAREST:
                drawn = tl.full(value.shape, 0.5, tl.float32)
            code, scale = _encode(value, drawn, inside, SIGNED, STEPS, BITS, BINADES, SMALLEST)
            tl.store(values + where, code, mask=inside)
            tl.store(scales + block, scale, mask=block < count)
        else:
            tl.store(values + where, _round_bf16(value, noise), mask=inside)

    @triton.jit
    def _places(size, line, blocks, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        begin = block % blocks * BLOCK
        column = begin[:, None] + tl.arange(0, BLOCK)[None, :]
        where = (block // blocks * line)[:, None] + column
        return block, where, (column < line) & (block < count)[:, None] & (where < size)

    @triton.jit(do_not_specialize=["seed", "place"])
    def _adamw_kernel(
        param, grad, first, first_scales, second, second_scales, size, line, blocks, count, seed, place, rate, keep,
        first_weight, second_keep, second_weight, root, eps, refused, CODES: tl.constexpr, MAXIMIZE: tl.constexpr,
        ON_DEVICE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BINADES: tl.constexpr,
        SMALLEST: tl.constexpr,
    ):  # fmt: skip
        if refused is not None and tl.load(refused) != 0:
            return
        if ON_DEVICE:
            rate, keep = tl.load(rate), tl.load(keep)
        block, where, inside = _places(size, line, blocks, count, ROWS, BLOCK)
        g = tl.load(grad + where, mask=inside, other=0.0).to(tl.float32)
        if MAXIMIZE:
            g = -g
        m = _load(first, first_scales, block, where, inside, count, CODES, True, 16, 4, BINADES)
        v = _load(second, second_scales, block, where, inside, count, CODES, False, 32, 5, BINADES)
        m = m + (g - m) * first_weight
        v = v * second_keep + g * g * second_weight
        p = tl.load(param + where, mask=inside, other=0.0)
        spread = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + root) + eps
        tl.store(param + where, p * keep - tl.div_rn(m, spread) * rate, mask=inside)
        drawn = _noise(seed, place + where)
        _store(
            m, first, first_scales, drawn & 0xFFFF, block, where, inside, count, CODES, False, True, 16, 4, BINADES,
            SMALLEST,
        )  # fmt: skip
        _store(
            v, second, second_scales, drawn >> 16, block, where, inside, count, CODES, False, False, 32, 5, BINADES,
            SMALLEST,
        )  # fmt: skip

    @triton.jit
    def _unpack_kernel(
        values, scales, out, size, line, blocks, count, CODES: tl.constexpr, SIGNED: tl.constexpr,
        STEPS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BINADES: tl.constexpr,
    ):  # fmt: skip
        block, where, inside = _places(size, line, blocks, count, ROWS, BLOCK)
        made = _load(values, scales, block, where, inside, count, CODES, SIGNED, STEPS, BITS, BINADES)
        tl.store(out + where, made, mask=inside)

    @triton.jit(do_not_specialize=["seed", "place"])
    def _pack_kernel(
        source, values, scales, size, line, blocks, count, seed, place, refused, CODES: tl.constexpr,
        NEAREST: tl.constexpr, SIGNED: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
        BLOCK: tl.constexpr, BINADES: tl.constexpr, SMALLEST: tl.constexpr,
    ):  # fmt: skip
        if refused is not None and tl.load(refused) != 0:
            return
        block, where, inside = _places(size, line, blocks, count, ROWS, BLOCK)
        value = tl.load(source + where, mask=inside, other=0.0)
        noise = _noise(seed, place + where)
        noise = noise & 0xFFFF if SIGNED else noise >> 16
        _store(
            value, values, scales, noise, block, where, inside, count, CODES, NEAREST, SIGNED, STEPS, BITS, BINADES,
            SMALLEST,
        )  # fmt: skip


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor | None],
    second: tuple[torch.Tensor, torch.Tensor | None],
    line: int,
    noise: Noise,
    numbers: Any,
    refused: torch.Tensor | None,
) -> None:
    """See ``packed.adamw_``."""
    grid, shape = _shape(param.numel(), line, first[1] is not None)
    on_device = isinstance(numbers.rate, torch.Tensor)
    _adamw_kernel[grid](
        param, grad, *first, *second, *shape, _signed(noise.seed), _signed(noise.first), numbers.rate, numbers.keep,
        numbers.first_weight, numbers.second_keep, numbers.second_weight, numbers.root, numbers.eps, refused,
        CODES=first[1] is not None, MAXIMIZE=numbers.maximize, ON_DEVICE=on_device, **_constants(),
        SMALLEST=SMALLEST_SCALE,
    )  # fmt: skip


def unpack(values: torch.Tensor, scales: torch.Tensor | None, line: int, signed: bool, out: torch.Tensor) -> None:
    """See ``packed.Stored.read``."""
    grid, shape = _shape(values.numel(), line, scales is not None)
    _unpack_kernel[grid](values, scales, out, *shape, CODES=scales is not None, **_map(signed), **_constants())


def pack_(
    source: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    line: int,
    signed: bool,
    noise: Noise | None,
    refused: torch.Tensor | None,
) -> None:
    """See ``packed.Stored.write_``. To the nearest bf16, torch rounds as fast."""
    grid, shape = _shape(values.numel(), line, scales is not None)
    drawn = noise or Noise(0, 0)
    _pack_kernel[grid](
        source, values, scales, *shape, _signed(drawn.seed), _signed(drawn.first), refused, CODES=scales is not None,
        NEAREST=noise is None, **_map(signed), **_constants(), SMALLEST=SMALLEST_SCALE,
    )  # fmt: skip


def _shape(size: int, line: int, codes: bool) -> tuple[tuple[int], tuple[int, int, int, int]]:
    """The grid; and elements, elements and blocks of a line, blocks. Without codes, all is one line."""
    line = line if codes else size
    blocks = line_blocks(line)
    count = size // line * blocks
    return (-(-count // _ROWS),), (size, line, blocks, count)


def _map(signed: bool) -> dict[str, int]:
    return {"SIGNED": signed, "STEPS": STEPS[signed], "BITS": STEPS[signed].bit_length() - 1}


def _constants() -> dict[str, Any]:
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}  # every operation rounded by itself
    return {"ROWS": _ROWS, "BLOCK": BLOCK, "BINADES": BINADES, **options}


def _signed(number: int) -> int:
    """32 bits as Triton takes them, whatever their value: its type of a number must not change from step to step."""
    return number - 2**32 if number >= 2**31 else number
