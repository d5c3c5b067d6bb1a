"""A moment as memory holds it, whatever the format, and AdamW's step over such moments: the definition in torch.

On a GPU ``packed_kernels`` does the same in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxshard.optim import packed_kernels as kernels
from fxshard.optim.formats import Noise, decoded, encoded, rounded_bf16
from fxshard.planner.layout import aligned
from fxshard.planner.state import line_blocks, line_numel, value_dtype


@dataclass(frozen=True)
class Stored:
    """Elements of one moment of one parameter: as they are computed with, in bf16, or codes with a scale for each block
    of a line."""

    values: torch.Tensor
    scales: torch.Tensor | None
    line: int
    signed: bool
    """Whether it is a first moment (or a momentum) and not a second."""
    exact: bool
    """Whether it is as it is computed with: no format of fewer bits."""

    @classmethod
    def cut(
        cls,
        memory: torch.Tensor,
        numel: int,
        shape: tuple[int, ...],
        format: str,
        *,
        signed: bool,
        exact: torch.dtype = torch.float32,
    ) -> Stored:
        """The beginning of some bytes, for rows of a parameter of that shape; it takes ``moment_bytes`` of them.

        ``exact``: the dtype that it is computed with.
        """
        line = line_numel(shape)
        dtype = value_dtype(format, line, exact)
        values = memory[: numel * dtype.itemsize].view(dtype)
        scales = None
        if dtype == torch.uint8:
            blocks = numel // line * line_blocks(line)
            scales = memory[aligned(numel) :][: 4 * blocks].view(torch.float32)
        return cls(values, scales, line, signed, format == "fp32" or dtype == torch.float32)

    @property
    def read_dtype(self) -> torch.dtype:
        """The dtype that reading gives and writing takes."""
        return self.values.dtype if self.exact else torch.float32

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.values,) if self.scales is None else (self.values, self.scales)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def holding(self, *tensors: torch.Tensor) -> Stored:
        """These elements in other memory."""
        return replace(self, values=tensors[0], scales=tensors[1] if len(tensors) > 1 else None)

    def part(self, begin: int, end: int) -> Stored:
        """Some of the elements, whole rows of them."""
        scales = self.scales
        if scales is not None:
            each = line_blocks(self.line)
            scales = scales[begin // self.line * each : end // self.line * each]
        return replace(self, values=self.values[begin:end], scales=scales)

    def read(self) -> torch.Tensor:
        """A copy, in fp32 if it is in fewer bits."""
        if self.exact:
            return self.values.clone()
        if self._by_kernel:
            out = torch.empty(self.values.shape, dtype=torch.float32, device=self.values.device)
            kernels.unpack(self.values, self.scales, self.line, self.signed, out)
            return out
        if self.scales is None:
            return self.values.float()
        return decoded(self.values, self.scales, self.line, signed=self.signed)

    def write_(self, given: torch.Tensor, noise: Noise | None = None, refused: torch.Tensor | None = None) -> None:
        """Take over values of ``read_dtype`` from the same device, rounded at random; to the nearest without ``noise``.

        Unless the number ``refused``, on the device, is there and not zero.
        """
        if not self.values.numel():
            return
        if self._by_kernel and (self.scales is not None or noise is not None):
            kernels.pack_(given, self.values, self.scales, self.line, self.signed, noise, refused)
            return
        for own, made in zip(self.tensors, self._made(given, noise), strict=True):
            own.copy_(made if refused is None else torch.where(refused != 0, own, made))

    def _made(self, given: torch.Tensor, noise: Noise | None) -> tuple[torch.Tensor, ...]:
        if self.exact:
            return (given,)
        drawn = noise.draw(given.numel(), given.device, second=not self.signed) if noise is not None else None
        if self.scales is None:
            return (rounded_bf16(given, drawn),)
        return encoded(given, self.line, drawn, signed=self.signed)

    @property
    def _by_kernel(self) -> bool:
        countable = 0 < self.values.numel() < kernels.MOST_NUMEL
        return self.values.is_cuda and kernels.HAS_TRITON and not self.exact and countable


@dataclass(frozen=True)
class Numbers:
    """The factors of one step of AdamW. ``rate`` and ``keep`` are tensors where the learning rate is one."""

    rate: float | torch.Tensor
    """lr / (1 − β₁ᵗ)."""
    keep: float | torch.Tensor
    """1 − lr·weight_decay."""
    first_weight: float
    second_keep: float
    second_weight: float
    root: float
    """√(1 − β₂ᵗ)."""
    eps: float
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int, device: torch.device) -> Numbers:
        """``step``: which of the parameter's steps this is, from 1 on."""
        one, two = (float(beta) for beta in group["betas"])
        lr = group["lr"]
        on_device = isinstance(lr, torch.Tensor) and lr.device.type == "cuda"  # not to be waited for
        lr = lr.to(device, torch.float32) if on_device else float(lr)
        return cls(
            lr / (1 - one**step),
            1 - lr * float(group["weight_decay"]),
            1 - one,
            two,
            1 - two,
            (1 - two**step) ** 0.5,
            float(group["eps"]),
            bool(group.get("maximize", False)),
        )


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    first: Stored,
    second: Stored,
    noise: Noise,
    numbers: Numbers,
    refused: torch.Tensor | None = None,
) -> None:
    """A step of AdamW over flat fp32 elements, with moments in fewer bits. The step is made with the moments before
    they are rounded. Unless the number ``refused``, on the device, is there and not zero.
    """
    if param.is_cuda and kernels.HAS_TRITON:
        one, two = (first.values, first.scales), (second.values, second.scales)
        kernels.adamw_(param, grad, one, two, first.line, noise, numbers, refused)
        return
    grad = -grad if numbers.maximize else grad
    m, v = first.read(), second.read()
    m = m + (grad - m) * numbers.first_weight
    v = v * numbers.second_keep + grad * grad * numbers.second_weight
    made = param * numbers.keep - m / (v.sqrt() / numbers.root + numbers.eps) * numbers.rate
    param.copy_(made if refused is None else torch.where(refused != 0, param, made))
    first.write_(m, noise, refused)
    second.write_(v, noise, refused)
