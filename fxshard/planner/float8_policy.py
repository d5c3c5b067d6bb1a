"""``fxshard.Float8``: linears in float8 with scales per tensor, row or block, and how their weights are gathered."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxshard._torch.errors import ConfigError
from fxshard.kernels.float8 import BLOCK, Scaling
from fxshard.kernels.float8_grouped import grouped_path, grouped_products
from fxshard.kernels.float8_products import MULTIPLE, path, scaled_products
from fxshard.planner.gather_modes import Float8Recipe, Gather
from fxshard.planner.precision import Precision
from fxshard.planner.quantized import Quantized

CHOICES = ("fp8", "bf16")
SMALLEST = 384


@dataclass(frozen=True)
class Float8(Quantized):
    """Chosen linears multiply in float8, as Hopper (compute capability 8.9 and up) does. The rest is bf16.

    - ``scaling``: what shares a scale. ``"tensor"``: all of a matrix; ``"row"``: what one element of a product sums
      over; ``"block"``: 128 of those, of weights 128 × 128. Scales are powers of two, made anew from the values of
      each step. Weights and activations are E4M3; so are output gradients, E5M2 with a scale per tensor.
    - ``weight_gradient``: ``"fp8"``, or ``"bf16"``, which multiplies activations and output gradients as they are.
    - ``linears``: patterns of ``nn.Linear`` names, or a function of name and weight shape; ``exclude``: patterns that
      are left out again. A weight with a dimension that 16 (``"block"``: 128) does not divide, or that something else
      than a linear uses too, stays in bf16; naming it without a wildcard is an error.
    - ``smallest``: linears with ``in · out / (in + out)`` below it stay in bf16 unless they are named: casting takes
      longer than their products save.
    - ``experts``: patterns of names of stacks of weights ``[experts, ..., ...]``, or a function of name and shape, none
      by default. They have scales per row whatever ``scaling`` says, in forward and input gradient; their weight
      gradients are bf16, and so is what travels.
    - ``gather="fp8"``: the largest magnitudes of all masters are combined over ranks in one all-reduce a step, owners
      quantize what they own, and float8 travels. ``"bf16"`` moves bf16 and quantizes where it multiplies. Neither
      changes a result.
    - ``emulate``: on a device without float8 products the same values are multiplied in a wider dtype; off, that is an
      error.
    - ``reduce`` and ``master`` are as in :class:`fxshard.Precision`.

    >>> fxshard.compile(model, zero=3, precision=fxshard.Float8(exclude=("head", "layers.0.*")))
    """

    scaling: str = "tensor"
    weight_gradient: str = "fp8"
    gather: str = "fp8"
    smallest: int = SMALLEST
    emulate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, known in (("scaling", tuple(map(str, Scaling))), ("weight_gradient", CHOICES), ("gather", CHOICES)):
            value = getattr(self, field)
            if value not in known:
                raise ConfigError(f"Float8({field}={value!r}): expected one of {', '.join(map(repr, known))}")

    @property
    def recipe(self) -> Float8Recipe:
        return Float8Recipe(Scaling(self.scaling), self.weight_gradient == "fp8")

    @property
    def cut(self) -> int:
        return self.recipe.cut

    def mode(self, zero: int) -> Gather:
        return Gather.DIRECT if self.gather == "fp8" else Gather.OFF

    def problem(self, shape: tuple[int, ...], named: bool) -> str | None:
        *experts, rows, columns = shape
        multiple = BLOCK if self.scaling == Scaling.BLOCK and not experts else MULTIPLE
        if rows % multiple or columns % multiple:
            return f"its weight is {rows} × {columns}, and {multiple} does not divide both"
        if experts:
            return None
        gain = rows * columns // (rows + columns)
        if gain < self.smallest and not named:
            return f"its weight is {rows} × {columns}: too small to gain ({gain} is below smallest={self.smallest})"
        return None


def check_products(policy: Precision | None, device: torch.device) -> None:
    """Refuse a device that would emulate products, if it is not to."""
    if not isinstance(policy, Float8) or policy.emulate:
        return
    scaling = Scaling(policy.scaling)
    if not scaled_products(device, scaling):
        raise ConfigError(
            f"Float8(scaling={policy.scaling!r}, emulate=False) on {device}: products would {path(device, scaling)}; "
            "use a GPU of compute capability 8.9 or higher with a scale per tensor or row, one of 9.0 with a scale per "
            "block, or leave emulate=True"
        )
    if policy.experts and not grouped_products(device):
        raise ConfigError(
            f"Float8(experts=..., emulate=False) on {device}: products of experts would {grouped_path(device)}; use a "
            "GPU of compute capability 9.0, or leave emulate=True"
        )
