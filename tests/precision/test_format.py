"""The format, bit by bit: against a second implementation, against Transformer Engine's bytes, and forth and back."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.kernels.mxfp8 import BLOCK, COLUMNWISE, ROWWISE, dequantize, quantize
from fxshard.kernels.mxfp8_products import swizzle
from tests.precision import scalar
from tests.precision.scalar import swizzled_index

VECTORS = Path(__file__).with_name("transformer_engine.npz")

any_bits = st.integers(0, 0xFFFF)
one_scale = st.integers(0, 0xFF).flatmap(  # neighbours in size: nothing vanishes beside the largest
    lambda top: st.builds(
        lambda sign, down, mantissa: sign << 15 | max(top - down, 0) << 7 | mantissa,
        st.integers(0, 1),
        st.integers(0, 12),
        st.integers(0, 0x7F),
    )
)
specials = st.sampled_from([0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0x7F7F])
blocks = st.one_of(*(st.lists(kind, min_size=BLOCK, max_size=BLOCK) for kind in (any_bits, one_scale)))
spiked = st.builds(lambda block, at, bits: [*block[:at], bits, *block[at + 1 :]], blocks, st.integers(0, 31), specials)


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)


@pytest.mark.shows("Q1")
@settings(max_examples=60)
@given(st.one_of(blocks, spiked))
def test_a_block_is_what_arithmetic_says(bits: list[int]) -> None:
    expected, scale = scalar.quantize([scalar.bf16(b) for b in bits])
    value = from_bits(bits)
    for axis, matrix in ((ROWWISE, value.view(1, BLOCK)), (COLUMNWISE, value.view(BLOCK, 1))):
        copy = quantize(matrix, axis)
        assert copy.scales.flatten().tolist() == [scale]
        assert copy.data.view(torch.uint8).flatten().tolist() == expected


@pytest.mark.shows("Q1")
def test_blocks_of_one_value() -> None:
    """Denormals, the smallest and the largest numbers, infinity and NaN, each filling a block."""
    for bits in [*range(0, 0x0100, 3), *range(0x7E00, 0x7F82), 0x8000, 0x8001, 0xFF80, 0xFFC0]:
        expected, scale = scalar.quantize([scalar.bf16(bits)] * BLOCK)
        copy = quantize(from_bits([bits] * BLOCK).view(1, BLOCK), ROWWISE)
        assert (copy.data.view(torch.uint8).flatten().tolist(), int(copy.scales)) == (expected, scale), hex(bits)


@given(st.integers(0, 0xFF), st.integers(0, 0xFF))
def test_dequantize(byte: int, scale: int) -> None:
    data = torch.full((1, BLOCK), byte, dtype=torch.uint8).view(torch.float8_e4m3fn)
    value = dequantize(data, torch.full((1, 1), scale, dtype=torch.uint8), ROWWISE)[0, 0].item()
    expected = scalar.number(byte, scale)
    assert value == expected or (math.isnan(value) and math.isnan(expected))


@pytest.mark.shows("Q1")
def test_equals_transformer_engine() -> None:
    """Bytes that Transformer Engine's master-weight cast made on an H200 (tests/gpu/make_mxfp8_vectors.py)."""
    file = np.load(VECTORS)
    names = sorted({key.split(".")[0] for key in file.files})
    assert names == ["any_bits", "normal", "one_scale"]
    for name in names:
        value = torch.from_numpy(file[f"{name}.value"].view(np.int16)).view(torch.bfloat16)
        for axis, what in ((ROWWISE, "rowwise"), (COLUMNWISE, "columnwise")):
            copy = quantize(value, axis)
            assert np.array_equal(copy.scales.numpy(), file[f"{name}.{what}_scales"]), (name, what)
            assert np.array_equal(copy.data.view(torch.uint8).numpy(), file[f"{name}.{what}"]), (name, what)


def test_a_short_last_block_counts_as_padded_with_zeros() -> None:
    value = torch.randn(50, 64)
    padded = torch.cat([value, torch.zeros(14, 64)])
    short, whole = quantize(value, COLUMNWISE), quantize(padded, COLUMNWISE)
    assert torch.equal(short.scales, whole.scales)
    assert torch.equal(short.data.view(torch.uint8), whole.data.view(torch.uint8)[:50])
    assert torch.equal(short.dequantize(), whole.dequantize()[:50])


def test_bf16_holds_what_is_dequantized() -> None:
    copy = quantize(torch.randn(64, 64) * 1e3, ROWWISE)
    assert torch.equal(copy.dequantize(torch.bfloat16).float(), copy.dequantize())


@pytest.mark.shows("Q11")
@given(st.integers(1, 300), st.integers(1, 11))
@settings(max_examples=25)
def test_swizzle_is_the_formula(rows: int, across: int) -> None:
    scales = torch.arange(rows * across, dtype=torch.int32).remainder(251).to(torch.uint8).view(rows, across)
    assert torch.equal(swizzle(scales)[swizzled_index(rows, across)], scales)
