"""What fxshard uses of Transformer Engine and of cuDNN's frontend, for machines that cannot have them.

The operations compute what the implementation ``torch`` does and behave where it matters as those of 2.20.2 do: a
``Sequential`` takes the list of parameters at its first run, its autograd is one function, the fused operation decides
at import whether it is supported, and what is not fused runs without a word. What graphs call of it, phase by phase, is
in ``te_fused_stand_in``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxshard.kernels import by_te, choose
from fxshard.kernels.by_torch import Call, Experts, TorchExperts
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


class Sequential(nn.Module):
    fuses = True
    addresses: list[list[int]] = []
    """Where the parameters of each run lay."""

    def __init__(self, first: GroupedLinear, activation: ScaledSwiGLU, second: GroupedLinear) -> None:
        super().__init__()
        self.first, self.activation, self.second = first, activation, second
        self._module_groups: list[SimpleNamespace] | None = None

    def forward(self, x: Tensor, splits: Tensor, scales: Tensor, again: Tensor, *bias_scales: Tensor) -> Tensor:
        assert splits is again and splits.dtype == torch.int64 and len(bias_scales) == self.second.scale_bias
        assert all(each is scales for each in bias_scales)
        if self._module_groups is None:
            self._flat = list(self.parameters())
            ops = [GroupedMLP_CuTeGEMMGLU()] if self.fuses else [self.first, self.activation, self.second]
            ran = [(op, [i]) for i, op in enumerate(ops)]
            self._module_groups = [SimpleNamespace(_forward_ops=ran, _backward_ops=ran)]
        Sequential.addresses.append([parameter.data_ptr() for parameter in self._flat])
        return _Run.apply(self, splits, x, scales, *self._flat)

    def call(self, splits: Tensor, scales: Tensor, parameters: tuple[Tensor, ...]) -> Call:
        named = dict(zip((name for name, _ in self.named_parameters()), parameters, strict=True))

        def stack(name: str) -> Tensor | None:
            found = [named[key] for i in range(self.first.groups) if (key := f"{name}{i}") in named]
            return torch.stack(found) if found else None

        gate, down = (weight.mT for name in ("first", "second") if (weight := stack(f"{name}.weight")) is not None)
        experts = Experts(gate, None, down, stack("first.bias"), None, stack("second.bias"))
        return Call(splits.cumsum(0), experts, scales, self.activation.glu, self.second.scale_bias)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mlp: Sequential, splits: Tensor, x: Tensor, scales: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call = mlp.call(splits, scales, parameters)
        out, ctx.pre, ctx.pre_up = TorchExperts().forward(x, ctx.call)
        out[int(splits.sum()) :] = torch.nan  # as kernels leave them
        ctx.x = x
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        torch_, call, (grad,) = TorchExperts(), ctx.call, grads
        grad_x, grad_pre, _, hidden, grad_scales = torch_.backward(grad, call, ctx.pre, ctx.pre_up)
        first = [torch_.weight_gradient(grad_pre, ctx.x, call.offsets)]
        second = [torch_.weight_gradient(grad, hidden, call.offsets)]
        if call.experts.gate_bias is not None:
            first.append(torch_.row_sum(grad_pre, call.offsets))
        if call.experts.down_bias is not None:
            scaled = grad * call.weights.unsqueeze(-1) if call.weighted_bias else grad
            second.append(torch_.row_sum(scaled, call.offsets))
        return None, None, grad_x, grad_scales, *(each for stack in (*first, *second) for each in stack.unbind(0))


class autocast:
    active: Any = None

    def __init__(self, enabled: bool, recipe: Any) -> None:
        self.recipe = recipe if enabled else None

    def __enter__(self) -> None:
        autocast.active = self.recipe

    def __exit__(self, *_: object) -> None:
        autocast.active = None


class MXFP8BlockScaling:
    def __init__(self, fp8_format: str) -> None:
        assert fp8_format == "E4M3"

    def mxfp8(self) -> bool:
        return True


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
        operations = (GroupedLinear, ScaledSwiGLU, ScaledClampedQGeGLU, Sequential)
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
            "transformer_engine.pytorch.quantization": SimpleNamespace(autocast=autocast),
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
        monkeypatch.setattr(Sequential, "fuses", True)
        monkeypatch.setenv(VARIABLE, "1")
        GroupedMLP_CuTeGEMMGLU.is_supported.cache_clear()
        Sequential.addresses.clear()
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
