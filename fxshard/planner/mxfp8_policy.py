"""``fxshard.MXFP8``: linears and experts in MXFP8, and how their weights are gathered."""

from __future__ import annotations

from dataclasses import dataclass

from fxshard._torch.errors import ConfigError
from fxshard.kernels.mxfp8 import BLOCK
from fxshard.planner.gather_modes import Gather
from fxshard.planner.quantized import Chooser, Quantized

CHOICES = ("auto", "staged", "direct", "off")


@dataclass(frozen=True)
class MXFP8(Quantized):
    """Chosen linears and experts multiply in MXFP8: forward, input gradient and weight gradient. The rest is bf16.

    - ``linears``: patterns of ``nn.Linear`` names, or a function of name and weight shape; ``experts``: the same for
      parameters ``[experts, rows, columns]`` that grouped products multiply; ``exclude``: patterns that are left out
      again. A weight with a dimension that 32 does not divide, or one of a linear that something else uses too, stays
      in bf16; naming it without a wildcard is an error.
    - ``gather``: ``"staged"`` moves bf16 and quantizes on every rank (ZeRO-1 and 2), ``"direct"`` moves the quantized
      copies (ZeRO-3), ``"auto"`` takes the one for the stage, ``"off"`` moves bf16 and quantizes where it multiplies.
      None of them changes a result.
    - ``reduce`` and ``master`` are as in :class:`fxshard.Precision`.

    >>> fxshard.compile(model, zero=3, precision=fxshard.MXFP8(exclude=("head", "layers.0.*")))
    """

    experts: tuple[str, ...] | Chooser = ("*",)
    gather: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gather not in CHOICES:
            raise ConfigError(f"MXFP8(gather={self.gather!r}): expected one of {', '.join(map(repr, CHOICES))}")

    @property
    def cut(self) -> int:
        return BLOCK  # columnwise blocks run down so many rows

    def problem(self, shape: tuple[int, ...], named: bool) -> str | None:
        *_, rows, columns = shape
        if rows % BLOCK or columns % BLOCK:
            return f"its weight is {' × '.join(map(str, shape))}, and {BLOCK} does not divide both"
        return None

    def mode(self, zero: int) -> Gather:
        """How the weights of chosen linears travel under a ZeRO stage."""
        fitting = Gather.DIRECT if zero == 3 else Gather.STAGED
        if self.gather == "auto":
            return fitting
        if self.gather != "off" and self.gather != fitting:
            why = (
                "forward and backward each need one copy, and staging would move bf16 for both"
                if zero == 3
                else "both copies are needed at once, which is more bytes than the bf16 they are made from"
            )
            raise ConfigError(
                f"MXFP8(gather={self.gather!r}) with zero={zero}: {why}; use gather={fitting.value!r} or 'auto'"
            )
        return Gather(self.gather)
