"""What is asked of an implementation: on which device, in which type, of which shape and form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxshard.kernels.glu import SWIGLU, Glu


@dataclass(frozen=True)
class Case:
    """What an implementation must be able to run."""

    device: torch.device
    dtype: torch.dtype
    hidden: int
    inner: int
    biased: bool = False
    glu: Glu = SWIGLU
    joined: bool = True
    """Whether gate and up are one weight."""
    out_by_in: bool = True
    """Whether each expert's matrices lie ``[out, in]`` in memory, as those of ``nn.Linear`` do."""
    experts: int = 1
    planned_for: tuple[int, int] | None = None
    """The compute capability of another GPU, for which this is planned here."""
    planned_on: str | None = None
    """The name of that device."""
