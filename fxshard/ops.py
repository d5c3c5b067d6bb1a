"""Operators of our own that compute: compiled segments call them like any other kernel."""

from __future__ import annotations

import torch

_library = torch.library.Library("fxshard", "DEF")
_library.define("mm_into(Tensor a, Tensor b, Tensor(c!) out) -> ()")


def _mm_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out = a @ b``, written where it stays; products of bf16 go to an fp32 ``out`` without rounding in between."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


_library.impl("mm_into", _mm_into, "CompositeExplicitAutograd")


@torch.library.register_fake("fxshard::mm_into", lib=_library)
def _(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    return None


mm_into = torch.ops.fxshard.mm_into.default
