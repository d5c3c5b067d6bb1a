"""Experts with Transformer Engine's grouped GEMM and activations, on the parameters' own memory.

Transformer Engine imports only with a CUDA build of torch and fails with all kinds of exceptions, so it is imported
when it is first wanted, and the reason is kept. Its bf16 grouped GEMM takes the numbers of tokens from the host: each
call waits for the device.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import torch

from fxshard.kernels.by_torch import TorchExperts, groups
from fxshard.kernels.glu import Glu

OLDEST = (2, 17)


class TransformerEngineExperts(TorchExperts):
    """The implementation ``te``."""

    def product(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        counts = _counts(offsets)
        turned = weight.stride(-1) != 1
        out = x.new_empty(x.shape[0], weight.shape[-1])
        matrices = list((weight.mT if turned else weight).unbind(0))
        self._gemm(matrices, _rows(x, counts), [out], "TN" if turned else "NN", counts, single_output=True)
        return out

    def weight_gradient(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        counts = _counts(offsets)
        out = a.new_empty(len(counts), a.shape[1], b.shape[1])
        self._gemm(_rows(b, counts), _rows(a, counts), list(out.unbind(0)), "NT", counts, single_output=False)
        return out

    def _gemm(self, a: Any, b: Any, out: Any, layout: str, counts: list[int], *, single_output: bool) -> None:
        gemm = engine().module("cpp_extensions").general_grouped_gemm
        none = [None] * len(counts)
        gemm(a, b, out, none, out[0].dtype, layout=layout, m_splits=counts, single_output=single_output)

    def activate(
        self, pre: torch.Tensor, pre_up: torch.Tensor | None, weights: torch.Tensor | None, glu: Glu
    ) -> torch.Tensor:
        if pre_up is not None or weights is None:  # Transformer Engine's takes a joined projection and weights
            return super().activate(pre, pre_up, weights, glu)
        tex, scales = engine().kernels, weights.to(pre.dtype)
        if glu.name == "SwiGLU":
            return tex.scaled_swiglu(pre, scales, None, glu.interleave)
        return tex.scaled_clamped_swiglu(pre, scales, None, glu.limit, glu.alpha, glu.offset, glu.interleave)

    def differentiate(
        self, pre: torch.Tensor, pre_up: torch.Tensor | None, grad: torch.Tensor, weights: torch.Tensor | None, glu: Glu
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        if pre_up is not None or weights is None:
            return super().differentiate(pre, pre_up, grad, weights, glu)
        tex, scales = engine().kernels, weights.to(pre.dtype)
        constants = () if glu.name == "SwiGLU" else (glu.limit, glu.alpha, glu.offset)
        backward = tex.scaled_dswiglu if glu.name == "SwiGLU" else tex.scaled_clamped_dswiglu
        grad_pre, grad_scales = backward(grad, pre, scales, None, *constants, glu.interleave, True)
        hidden = self.activate(pre, None, weights, glu)
        return grad_pre, pre.new_empty(0), hidden, grad_scales.to(weights.dtype)


class _Engine:
    """Transformer Engine as far as it is used here, imported, or the reason why it cannot be."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.version = "none"
        self.kernels: Any = None
        if not torch.cuda.is_available():
            self.refusal = "Transformer Engine needs a CUDA device"
            return
        try:
            self.version = str(importlib.import_module("transformer_engine").__version__)
            importlib.import_module("transformer_engine.pytorch")
            self.kernels = importlib.import_module("transformer_engine_torch")
        except Exception as error:  # ImportError, RuntimeError, OSError, AssertionError have been seen
            self.refusal = f"Transformer Engine does not import ({type(error).__name__}: {error})"
            return
        if tuple(int(part) for part in self.version.split("+")[0].split(".")[:2]) < OLDEST:
            self.refusal = f"Transformer Engine {self.version} is older than {'.'.join(map(str, OLDEST))}"

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"transformer_engine.pytorch.{name}")


@cache
def engine() -> _Engine:
    """Transformer Engine, imported when it is first needed."""
    return _Engine()


def engine_refusal() -> str | None:
    """Why Transformer Engine cannot be used on this machine, or None."""
    return engine().refusal


def _counts(offsets: torch.Tensor) -> list[int]:
    return [end - begin for begin, end in groups(offsets)]


def _rows(x: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    return list(torch.split(x.contiguous()[: sum(counts)], counts))
