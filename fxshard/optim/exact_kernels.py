# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""AdamW on a GPU with moments as they are computed with, which leaves the largest magnitude of what it wrote.

The step is that of torch's fused kernel, operation by operation, with its fused multiply-adds, so the bits are its own.
That kernel tells nothing about what it wrote, and to find it would take another pass over all masters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from fxshard.kernels.launch import Launches, pointers

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    from fxshard.kernels.triton_float8 import largest_bits

    HAS_TRITON = True
except ImportError:  # torch for the CPU comes without Triton
    HAS_TRITON = False

_BLOCK, _WARPS = 2048, 8


if HAS_TRITON:

    @triton.jit
    def _adamw_kernel(
        param, grad, first, second, step, largest, refused, on_device, size, lr, beta1, beta2, decay, eps,
        DECAYS: tl.constexpr, MAXIMIZE: tl.constexpr, REFUSABLE: tl.constexpr, ON_DEVICE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = where < size
        if ON_DEVICE:
            lr = tl.load(on_device)
        one = tl.zeros((1,), tl.float32)
        count = one + tl.load(step)
        step_size = tl.div_rn(one + lr, 1.0 - libdevice.pow(one + beta1, count))
        root = tl.sqrt_rn(1.0 - libdevice.pow(one + beta2, count))
        old = tl.load(param + where, mask=inside, other=0.0)
        g = tl.load(grad + where, mask=inside, other=0.0)
        m = tl.load(first + where, mask=inside, other=0.0)
        v = tl.load(second + where, mask=inside, other=0.0)
        if MAXIMIZE:
            g = -g
        p = old
        if DECAYS:
            p = tl.fma(p, tl.zeros_like(p) - lr * decay, p)
        square = g * g
        m = tl.fma(m, tl.zeros_like(m) + beta1, tl.fma(g, tl.zeros_like(g) - beta1, g))
        v = tl.fma(v, tl.zeros_like(v) + beta2, tl.fma(square, tl.zeros_like(v) - beta2, square))
        spread = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + root) + eps
        p = p - tl.div_rn(step_size * m, spread)
        written = inside
        if REFUSABLE:
            written = inside & (tl.load(refused) == 0)
            p = tl.where(written, p, old)
        tl.store(param + where, p, mask=written)
        tl.store(first + where, m, mask=written)
        tl.store(second + where, v, mask=written)
        tl.atomic_max(largest, largest_bits(p, inside))


def adamw_(
    group: Mapping[str, Any],
    tensors: tuple[torch.Tensor, ...],
    largest: torch.Tensor,
    refused: torch.Tensor | None,
) -> None:
    """A step over (fp32 parameter, gradient, both moments, step) by the numbers of ``group``; ``largest``, an fp32
    number, becomes that of the new magnitudes if it is smaller. A step that is refused leaves the old parameters.
    """
    param, grad, first, second, step = tensors
    size, lr = param.numel(), group["lr"]
    on_device = isinstance(lr, torch.Tensor) and lr.is_cuda
    optional = (step if refused is None else refused, lr if on_device else step)
    given = (param, grad, first, second, step, largest.view(torch.int32), *optional)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    numbers = (0.0 if on_device else float(lr), beta1, beta2, float(group["weight_decay"]), float(group["eps"]))
    constants = (numbers[3] != 0, bool(group.get("maximize", False)), refused is not None, on_device, _BLOCK)
    key = (param.device.index, pointers(*given), size, constants)
    with torch.cuda.device(param.device):
        _launches()(key, (-(-size // _BLOCK), 1, 1), (*given, size, *numbers, *constants))


@functools.cache
def _launches() -> Launches:
    return Launches(_adamw_kernel, num_warps=_WARPS, enable_fp_fusion=False)
