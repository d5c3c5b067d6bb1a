"""Write ``tests/precision/transformer_engine.npz``: bytes that Transformer Engine makes of chosen and random values.

Needs a GPU and Transformer Engine 2.20. Below compute capability 10 its ordinary MXFP8 kernels are empty; the cast of
master weights is not, so that is what is asked. Usage: python -m tests.gpu.make_mxfp8_vectors FILE
"""

from __future__ import annotations

import sys

import numpy as np
import torch

ROWS, COLUMNS = 64, 64


def values() -> dict[str, torch.Tensor]:
    """Three matrices: ordinary numbers, numbers near one power of two per block, and any bits at all."""
    random = np.random.default_rng(0)
    shape = (ROWS, COLUMNS)
    sign = random.integers(0, 2, shape) << 15
    top = np.kron(random.integers(0, 256, (ROWS // 32, COLUMNS // 32)), np.ones((32, 32), dtype=np.int64))
    near = sign | np.maximum(top - random.integers(0, 12, shape), 0) << 7 | random.integers(0, 128, shape)
    anything = random.integers(0, 1 << 16, shape)
    specials = [0x0000, 0x8000, 0x0001, 0x007F, 0x7F7F, 0xFF7F, 0x7FC0, 0xFFC0, 0x7F80, 0xFF80]
    anything[:32, :32] = 0  # a block of zeros, then one special at a time in blocks that are otherwise small
    anything[32:, :32] = random.integers(0, 0x0080, (32, 32))
    anything[32 : 32 + len(specials), 40] = specials
    normal = torch.from_numpy(random.standard_normal(shape)).to(torch.bfloat16).view(torch.int16).numpy()
    made = {"normal": normal, "one_scale": near, "any_bits": anything}
    return {name: torch.from_numpy(bits.astype(np.uint16).view(np.int16)) for name, bits in made.items()}


def transformer_engine(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Both copies and scales of a bf16 matrix on the GPU."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.optimizers import multi_tensor_applier
    from transformer_engine.pytorch.tensor import utils

    rows, columns = value.shape
    empty = te.MXFP8Quantizer(te.DType.kFloat8E4M3).make_empty((rows, columns), dtype=value.dtype, device=value.device)
    scales = [empty._rowwise_scale_inv, empty._columnwise_scale_inv]
    largest = [torch.zeros(s.shape, device=value.device, dtype=value.dtype) for s in scales]
    tex.mxfp8_scaling_compute_partial_amax(value.view(-1), *largest, rows, columns, 0)
    multi_tensor_applier(utils.multi_tensor_compute_scale_inv_e8m0, None, [largest, scales])
    data = [empty._rowwise_data, empty._columnwise_data]
    flat = [d.view(-1) for d in data]
    tex.mxfp8_scaling_partial_cast(value.view(-1), *flat, *scales, rows, columns, 0)
    return {
        "rowwise": data[0],
        "columnwise": data[1],
        "rowwise_scales": scales[0][:rows, : columns // 32],
        "columnwise_scales": scales[1][: rows // 32, :columns],
    }


def main() -> None:
    arrays = {}
    for name, bits in values().items():
        arrays[f"{name}.value"] = bits.numpy().view(np.uint16)
        for what, tensor in transformer_engine(bits.cuda().view(torch.bfloat16)).items():
            arrays[f"{name}.{what}"] = tensor.contiguous().cpu().view(torch.uint8).numpy()
    np.savez_compressed(sys.argv[1], **arrays)


if __name__ == "__main__":
    main()
