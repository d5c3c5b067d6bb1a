"""What a user chooses of a compilation, in one frozen value: for ``compile``, ``shard`` and ``plan``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from fxshard._torch.errors import ConfigError
from fxshard.kernels.choose import choices
from fxshard.planner.choice import LAYOUTS, LayoutKind
from fxshard.planner.domain import ZERO, Reduction
from fxshard.planner.hardware import Hardware, hardware
from fxshard.planner.precision import Precision
from fxshard.planner.quantized import check_precision
from fxshard.planner.units import UnitPatterns

if TYPE_CHECKING:
    from fxshard.passes.pass_list import PassList

LOWERINGS = ("inductor", "eager")
ACTIVATIONS = ("auto", "recompute", "offload")

_UNITS = {
    "": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def bytes_in(size: int | str) -> int | None:
    """``60GiB``, ``"1.5 GB"`` or a number of bytes; None if it is something else."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?i?b?)\s*", str(size).lower())
    try:
        return None if match is None else int(float(match[1]) * _UNITS[match[2] if match[2] != "b" else ""])
    except (KeyError, ValueError):
        return None


def _checked_budget(budget: int | str | None) -> int | None:
    if budget is None:
        return None
    size = bytes_in(budget)
    if size is None:
        raise ConfigError(f'memory_budget={budget!r}: expected bytes, or a string such as "60GiB" or "1.5GB"')
    if size <= 0:
        raise ConfigError(f"memory_budget={budget!r}: expected more than nothing")
    return size


@dataclass(frozen=True)
class Debug:
    """Switches for finding out what a part of the compiler does. No one changes a result by more than rounding.

    - ``prefetch``: how many all-gathers run ahead of the one in use, 0 gathers when needed; None lets the cost model
      decide when each one must start.
    - ``keep_resident``: buckets stay unsharded between forward and backward where they fit.
    - ``defer_wgrad``: weight-gradient products of backward run where they hide communication that nothing else hides.
    - ``overlap``: collectives run during compute; off, each one is waited for where it starts.
    - ``arena``: buffers have planned places in one allocation; off, each is allocated when needed.
    - ``fold_layers``: layers that repeat go through autograd once, not one by one.
    - ``chunk_loss``: losses are computed in chunks of tokens, without logits, wherever that is possible; off, nowhere;
      None with ``return_logits=False``.
    - ``window_attention``: attention whose mask is a window, separates documents or hides padding reads no mask of
      queries and keys; off, nowhere; None where there is a kernel for it, which is on CUDA in half precision.
    - ``verify``: check every schedule. ``verify_each_pass``: check the graphs after each pass, too, so that an error
      names the pass that made it.

    >>> fxshard.compile(model, debug=fxshard.Debug(prefetch=0, keep_resident=False))
    """

    prefetch: int | None = None
    keep_resident: bool = True
    defer_wgrad: bool = True
    overlap: bool = True
    arena: bool = True
    fold_layers: bool = True
    chunk_loss: bool | None = None
    window_attention: bool | None = None
    verify: bool = True
    verify_each_pass: bool = False

    def __post_init__(self) -> None:
        ahead = self.prefetch
        if ahead is not None and (not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0):
            raise ConfigError(f"prefetch={ahead!r}: expected the number of gathers to run ahead, 0 or more, or None")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "prefetch" or isinstance(value, bool) or (value is None and field.default is None):
                continue
            raise ConfigError(f"Debug({field.name}={value!r}): expected True or False")


@dataclass(frozen=True)
class Options:
    """What ``compile``, ``shard`` and ``plan`` are told, checked. Their docstrings say what each option does."""

    zero: int = 3
    units: UnitPatterns | None = None
    precision: Precision | None = None
    layout: LayoutKind = "auto"
    reduction: Reduction = "mean"
    memory_budget: int | str | None = None
    activations: str = "auto"
    hardware: str | Hardware | None = None
    experts: str = "auto"
    return_logits: bool = True
    passes: PassList | None = None
    lowering: str = "inductor"
    cuda_graphs: bool = False
    debug: Debug = Debug()

    def __post_init__(self) -> None:
        if self.zero not in ZERO or isinstance(self.zero, bool):
            raise ConfigError(f"zero={self.zero!r}: expected 0, 1, 2 or 3")
        check_precision(self.precision)
        object.__setattr__(self, "memory_budget", _checked_budget(self.memory_budget))
        if self.hardware is not None:
            hardware(self.hardware)
        known = {"layout": LAYOUTS, "lowering": LOWERINGS, "experts": choices(), "activations": ACTIVATIONS}
        for name, values in known.items():
            value = getattr(self, name)
            if value not in values:
                raise ConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, values))}")
        if self.activations != "auto" and self.memory_budget is None:
            raise ConfigError(
                f"activations={self.activations!r} says what is done with saved values that memory_budget has no room "
                "for, but there is none: give memory_budget="
            )
        if not isinstance(self.return_logits, bool):
            raise ConfigError(f"return_logits={self.return_logits!r}: expected True or False")
        if not isinstance(self.debug, Debug):
            raise ConfigError(f"debug={self.debug!r}: expected fxshard.Debug(...)")
        if self.passes is not None:
            from fxshard.passes.pass_list import PassList  # which knows these options

            if not isinstance(self.passes, PassList):
                raise ConfigError(
                    f"passes={self.passes!r}: expected a list derived from fxshard.PASSES, such as "
                    'fxshard.PASSES.after("insert_reshard", my_pass)'
                )

    @property
    def budget(self) -> int | None:
        """``memory_budget`` in bytes."""
        assert not isinstance(self.memory_budget, str)
        return self.memory_budget

    @property
    def fused(self) -> bool:
        """Whether stretches of compute are compiled, so that not every value in them is written to memory."""
        return self.lowering == "inductor"

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | None) -> Options:
        """Options as ``torch.compile(..., options={...})`` passes them."""
        known = [field.name for field in fields(cls)]
        for name in options or {}:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}; known options: {', '.join(known)}")
        return cls(**(options or {}))
