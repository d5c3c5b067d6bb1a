"""Float8 from its definition, in other operations than fxshard's: ``math.frexp``, loops over blocks, plain autograd."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tests.precision.nets import Net, single

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def scale(largest: float, dtype: torch.dtype) -> float:
    """The smallest power of two with which the largest magnitude fits."""
    if largest == 0.0:
        return 2.0**-126
    exponent = math.frexp(largest / LARGEST[dtype])[1] - 1  # of the power of two at or below it
    below = 2.0**exponent
    fits = below if largest <= below * LARGEST[dtype] else 2 * below
    return max(fits, 2.0**-126)


def quantized(value: torch.Tensor, tile: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The values that float8 keeps of a matrix in which tiles of so many rows and columns share a scale."""
    kept = torch.empty(value.shape)
    for i in range(0, value.shape[0], tile[0]):
        for j in range(0, value.shape[1], tile[1]):
            part = value[i : i + tile[0], j : j + tile[1]].double()
            shared = scale(float(part.abs().max()), dtype)
            limited = (part / shared).clamp(-LARGEST[dtype], LARGEST[dtype])
            kept[i : i + tile[0], j : j + tile[1]] = limited.float().to(dtype).float() * shared
    return kept


def tiles(scaling: str, shape: torch.Size, axis: int, weight: bool) -> tuple[int, int]:
    """How many rows and columns share a scale, if a product sums over ``axis``."""
    whole = tuple(shape)
    if scaling == "tensor":
        return whole[0], whole[1]
    if scaling == "row":
        return (1, whole[1]) if axis == 1 else (whole[0], 1)
    if weight:
        return 128, 128
    return (1, 128) if axis == 1 else (128, 1)


class Product(torch.autograd.Function):
    """A linear in float8 as one would write it by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, scaling: str, wgrad: str) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.scaling, ctx.wgrad = scaling, wgrad
        w = w.to(x.dtype)  # a master
        a = quantized(x, tiles(scaling, x.shape, 1, False), E4M3)
        return (a @ quantized(w, tiles(scaling, w.shape, 1, True), E4M3).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x, w), scaling = ctx.saved_tensors, ctx.scaling
        dtype = E5M2 if scaling == "tensor" else E4M3
        rows = quantized(dy, tiles(scaling, dy.shape, 1, False), dtype)
        dx = (rows @ quantized(w.to(x.dtype), tiles(scaling, w.shape, 0, True), E4M3)).to(x.dtype)
        if ctx.wgrad == "bf16":
            return dx, dy.t() @ x, None, None
        down = quantized(dy, tiles(scaling, dy.shape, 0, False), dtype)
        return dx, (down.t() @ quantized(x, tiles(scaling, x.shape, 0, False), E4M3)).to(w.dtype), None, None


class ByHand(nn.Module):
    def __init__(self, linear: nn.Linear, scaling: str, wgrad: str) -> None:
        super().__init__()
        self.weight, self.bias, self.how = linear.weight, linear.bias, (scaling, wgrad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Product.apply(x.flatten(0, -2), self.weight, *self.how).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def by_hand(scaling: str, wgrad: str = "fp8", width: int = 1) -> Net:
    """The model of ``nets`` in bf16 whose blocks multiply in float8 by hand."""
    model = single(width).to(torch.bfloat16)
    assert isinstance(model, Net)
    for layer in model.layers:
        layer.up, layer.down = ByHand(layer.up, scaling, wgrad), ByHand(layer.down, scaling, wgrad)
    return model
