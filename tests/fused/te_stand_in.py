"""What fxshard uses of Transformer Engine and of cuDNN's frontend, for machines that cannot have them.

The fused operation decides at import whether it is supported, as that of 2.20.2 does. What graphs call of it, phase by
phase, is in ``te_fused_stand_in``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fxshard.kernels import by_te, choose
from fxshard.kernels.glu import SWIGLU, Glu
from tests.fused.te_fused_stand_in import (
    VARIABLE,
    GroupedMLP_CuTeGEMMGLU,
    GroupedTensorStorage,
    MXFP8Tensor,
    OperationContext,
    WeightGradStore,
    _cudnn_compute_wgrad,
)


class GroupedLinear(nn.Module):
    def __init__(
        self,
        groups: int,
        width: int,
        out: int,
        *,
        bias: bool,
        device: str,
        dtype: torch.dtype,
        scale_bias: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__()
        assert device == "meta"
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.recipe: Any = None
        self.groups, self.width, self.out, self.scale_bias = groups, width, out, scale_bias
        for i in range(groups):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(out, width, device=device, dtype=dtype)))
        for i in range(groups if bias else 0):
            self.register_parameter(f"bias{i}", nn.Parameter(torch.empty(out, device=device, dtype=dtype)))

    def reset_recipe_state(self, *, recipe: Any) -> None:
        self.recipe = recipe

    def get_quantizer(self, mode: str, index: int) -> str | None:
        return f"{mode} {index}" if self.recipe is not None else None


class ScaledSwiGLU(nn.Module):
    def __init__(self, glu_interleave_size: int | None = None) -> None:
        super().__init__()
        self.glu = replace(SWIGLU, interleave=glu_interleave_size or 0)


class ScaledClampedQGeGLU(ScaledSwiGLU):
    def __init__(
        self, glu_interleave_size: int | None, *, limit: float, alpha: float, glu_linear_offset: float
    ) -> None:
        super().__init__(glu_interleave_size)
        self.glu = Glu(alpha, limit, glu_linear_offset, glu_interleave_size or 0)


class MXFP8BlockScaling:
    def __init__(self, fp8_format: str) -> None:
        assert fp8_format == "E4M3"


class Machine:
    """A machine on which all gates of the fused grouped MLP hold, until a test changes one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.frontend: str | None = "1.24.1"
        self.capability = (10, 0)
        self.engine, self.fused = ModuleType("transformer_engine"), ModuleType("fused")
        self.engine.__version__ = "2.20.2"  # type: ignore[attr-defined]
        self.fused.GroupedMLP_CuTeGEMMGLU = GroupedMLP_CuTeGEMMGLU  # type: ignore[attr-defined]
        self.cudnn = SimpleNamespace(
            **{f"grouped_gemm_{name}_wrapper_sm100": None for name in ("glu", "dglu", "quant", "wgrad")}
        )
        operations = (GroupedLinear, ScaledSwiGLU, ScaledClampedQGeGLU)
        modules = {
            "transformer_engine": self.engine,
            "transformer_engine.pytorch": ModuleType("pytorch"),
            "transformer_engine.pytorch.ops": SimpleNamespace(**{each.__name__: each for each in operations}),
            "transformer_engine.pytorch.ops.fused": self.fused,
            "transformer_engine.pytorch.ops.fused.grouped_mlp": SimpleNamespace(
                _cudnn_compute_wgrad=_cudnn_compute_wgrad
            ),
            "transformer_engine.pytorch.ops.op": SimpleNamespace(OperationContext=OperationContext),
            "transformer_engine.pytorch.constants": SimpleNamespace(DType=SimpleNamespace(kFloat8E4M3="E4M3")),
            "transformer_engine.pytorch.tensor.mxfp8_tensor": SimpleNamespace(MXFP8Tensor=MXFP8Tensor),
            "transformer_engine.pytorch.tensor.storage.grouped_tensor_storage": SimpleNamespace(
                GroupedTensorStorage=GroupedTensorStorage
            ),
            "transformer_engine.common.recipe": SimpleNamespace(
                MXFP8BlockScaling=MXFP8BlockScaling, Format=SimpleNamespace(E4M3="E4M3")
            ),
            "transformer_engine_torch": ModuleType("transformer_engine_torch"),
            "cudnn": self.cudnn,
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        version = metadata.version
        monkeypatch.setattr(
            metadata, "version", lambda name: self._version() if name == "nvidia-cudnn-frontend" else version(name)
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: self.capability)
        monkeypatch.setenv(VARIABLE, "1")
        GroupedMLP_CuTeGEMMGLU.is_supported.cache_clear()
        GroupedMLP_CuTeGEMMGLU.ran.clear()

    def _version(self) -> str:
        if self.frontend is None:
            raise metadata.PackageNotFoundError("nvidia-cudnn-frontend")
        return self.frontend

    def import_engine(self) -> None:
        """As a program does that has a CUDA device."""
        with self.patch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            GroupedMLP_CuTeGEMMGLU.is_supported()
            by_te.engine()

    def refusal(self, case: choose.Case) -> str | None:
        with self.patch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            return choose.refusal("te-mxfp8", case)
