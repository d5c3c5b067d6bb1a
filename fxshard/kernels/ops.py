"""Operators of our own that compute: compiled segments call them like any other kernel."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_LIBRARY = torch.library.Library("fxshard", "DEF")
COMPILED_AHEAD: dict[Any, Callable[..., Any]] = {}
"""Operators whose Triton kernels take seconds to compile, and what runs them."""


@cache
def has_triton() -> bool:
    """Whether Triton is installed: torch for the CPU comes without it."""
    return importlib.util.find_spec("triton") is not None


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
    contiguous: bool = False,
    compiled_ahead: bool = False,
) -> Any:
    """The operator ``fxshard::NAME`` of a schema ``NAME(...) -> ...``, on every device.

    ``fake`` gives results of the right shapes while tracing; ``backward`` and ``setup_context`` are those of
    ``torch.library.register_autograd``. ``flops`` counts operations, given the shapes of tensors. ``compiled_ahead``:
    what ``compile_ahead`` looks for. ``contiguous``: a compiler, which chooses layouts, has to give it such tensors.
    """
    name = _LIBRARY.define(schema, tags=(torch.Tag.needs_contiguous_strides,) if contiguous else ())
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxshard::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"fxshard::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    if flops is not None:
        register_flop_formula(getattr(torch.ops.fxshard, name))(flops)
    operator = getattr(torch.ops.fxshard, name).default
    if compiled_ahead:
        COMPILED_AHEAD[operator] = kernel
    return operator


def _mm_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out = a @ b``, written where it stays; products of bf16 go to an fp32 ``out`` without rounding in between."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


mm_into = define("mm_into(Tensor a, Tensor b, Tensor(c!) out) -> ()", _mm_into, lambda a, b, out: None)


def _scaled_into(value: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """``out = value · factor``, written where it stays and rounded once."""
    torch.mul(value, factor, out=out)


scaled = define(
    "scaled(Tensor value, Tensor factor, ScalarType dtype) -> Tensor",
    lambda value, factor, dtype: (value * factor).to(dtype),
    lambda value, factor, dtype: torch.empty_like(value, dtype=dtype),
)
scaled_into = define(
    "scaled_into(Tensor value, Tensor factor, Tensor(c!) out) -> ()", _scaled_into, lambda value, factor, out: None
)

cos = define("cos(Tensor angles) -> Tensor", torch.cos, torch.cos)
sin = define("sin(Tensor angles) -> Tensor", torch.sin, torch.sin)
"""Of a table: torch's kernels, also where a compiler would write one."""
