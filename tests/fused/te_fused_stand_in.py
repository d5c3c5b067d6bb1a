"""The fused operation of Transformer Engine's grouped MLP, phase by phase, for machines that cannot have it.

It multiplies in MXFP8 and asserts that it is called as the real one wants to be; ``test_te_source`` compares what both
take and give.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from fxshard.kernels.by_torch import Call, Experts, TorchExperts, bias_dot, bias_rows
from fxshard.kernels.mxfp8 import COLUMNWISE, E4M3, ROWWISE, Quantized, quantize

VARIABLE = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"


class GroupedMLP_CuTeGEMMGLU:
    """Supported is what is at import; the device and cuDNN's frontend are taken to be right."""

    ran: list[tuple[str, list[int]]] = []
    """What was called, and where the weights of the call lay."""

    def __init__(self, *, fc1: Any = None, activation: Any = None, fc2: Any = None) -> None:
        self.fc1, self.activation, self.fc2 = fc1, activation, fc2

    def fuser_forward(
        self,
        basic_op_ctxs: list[Any],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, list[tuple[()]]]:
        (splits, *_), (scales,), (again, *bias_scales) = basic_op_extra_inputs
        assert splits is again and splits.dtype == torch.int64 and len(bias_scales) == self.fc2.scale_bias
        assert input_.shape[0] % 128 == 0 and not (splits % 128).any() and basic_op_kwargs == [{}, {}, {}]
        assert all(weight.requires_grad == basic_op_ctxs[0].requires_grad for weight in self._weights(self.fc1))
        gate, down = self._lent("_rowwise", "forward")
        call = self._call(gate, down, splits, scales)
        torch_ = TorchExperts()
        pre, _, hidden = torch_.up(quantize(input_, ROWWISE).dequantize(), call)
        out = torch_.product(quantize(hidden, ROWWISE).dequantize(), call.experts.down, call.offsets)
        if call.experts.down_bias is not None:
            out += bias_rows(call.experts.down_bias, call.offsets, out, scales if call.weighted_bias else None)
        out[int(splits.sum()) :] = torch.nan  # as kernels leave them
        if basic_op_ctxs[0].requires_grad:
            places = [splits, *[None] * 6]
            kept = (columns(input_), *self._weights(self.fc1), pre.to(input_.dtype), scales, columns(hidden))
            basic_op_ctxs[0].save_for_backward(*places, *kept, *self._weights(self.fc2))
        return out.to(input_.dtype), [(), (), ()]

    def fuser_backward(self, basic_op_ctxs: list[Any], grad_output: Tensor) -> tuple[Any, ...]:
        first, _, second = basic_op_ctxs
        experts = self.fc1.groups
        splits, begins, ends, *strided = first.saved_tensors[:7]
        assert torch.equal(splits.cumsum(0), begins[1:]) and torch.equal(ends, begins[1:].int()) and begins[0] == 0
        sizes = (self.fc1.width, self.fc1.out, self.fc2.width, self.fc2.out)
        assert all(torch.equal(each, begins * size) for each, size in zip(strided, sizes, strict=True))
        tokens, pre, scales, hidden = (first.saved_tensors[7 + i] for i in (0, 1 + experts, 2 + experts, 3 + experts))
        assert tokens is None and hidden is None and len(first.saved_tensors) == 11 + 2 * experts
        assert first.weight_requires_grad and second.weight_requires_grad and first.dtype == second.dtype
        gate, down = self._lent("_columnwise", "backward")
        call, torch_ = self._call(gate, down, splits, scales), TorchExperts()
        grad_hidden = torch_.product(quantize(grad_output, ROWWISE).dequantize(), call.experts.down.mT, call.offsets)
        grad_pre, _, _, grad_scales = torch_.differentiate(pre.float(), None, grad_hidden, scales.float(), call.glu)
        grad_x = torch_.product(quantize(grad_pre, ROWWISE).dequantize(), call.experts.gate.mT, call.offsets)
        for linear, gradient in ((self.fc1, grad_pre), (self.fc2, grad_output)):
            linear.wgrad_store.put([None, columns(gradient), None], None)
        of_first, of_second = [None] * experts, [None] * experts
        if call.experts.gate_bias is not None:
            of_first += list(torch_.row_sum(grad_pre, call.offsets).to(first.dtype).unbind(0))
        if call.experts.down_bias is not None:
            scaled = grad_output * scales.unsqueeze(-1) if call.weighted_bias else grad_output
            of_second += list(torch_.row_sum(scaled, call.offsets).to(first.dtype).unbind(0))
            if call.weighted_bias:
                grad_scales = grad_scales + bias_dot(call.experts.down_bias, call.offsets, grad_output)
        extra = [(None,), (grad_scales.to(first.dtype),), (None,) * (1 + self.fc2.scale_bias)]
        return grad_x.to(first.dtype), [of_first, (), of_second], extra

    @staticmethod
    def grouped_gemm_wgrad_kernel() -> str:
        return "kernel"

    def _weights(self, linear: Any) -> list[Any]:
        return [getattr(linear, f"weight{i}") for i in range(linear.groups)]

    def _lent(self, copy: str, phase: str) -> list[Tensor]:
        both = [self._weights(linear) for linear in (self.fc1, self.fc2)]
        self.ran.append((phase, [getattr(each, f"{copy}_data").data_ptr() for stack in both for each in stack]))
        return [torch.stack([each.dequantize(copy) for each in stack]).mT for stack in both]

    def _call(self, gate: Tensor, down: Tensor, splits: Tensor, scales: Tensor) -> Call:
        def bias(linear: Any) -> Tensor | None:
            found = [getattr(linear, f"bias{i}", None) for i in range(linear.groups)]
            return None if found[0] is None else torch.stack(found)

        experts = Experts(gate, None, down, bias(self.fc1), None, bias(self.fc2))
        return Call(splits.cumsum(0), experts, scales, self.activation.glu, self.fc2.scale_bias)

    @classmethod
    @functools.cache
    def is_supported(cls) -> bool:
        return int(os.environ.get(VARIABLE, "0")) > 0


class MXFP8Tensor:
    """Scales are padded to tiles, of which nothing is read."""

    def __init__(
        self,
        *,
        shape: torch.Size,
        dtype: torch.dtype,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: str,
        quantizer: str,
        with_gemm_swizzled_scales: bool,
        requires_grad: bool,
        device: torch.device,
    ) -> None:
        assert fp8_dtype == "E4M3" and quantizer == "forward 1" and not with_gemm_swizzled_scales
        self.requires_grad = requires_grad
        self.shape, self._rowwise_data, self._columnwise_data = shape, rowwise_data, columnwise_data
        self._rowwise_scale_inv, self._columnwise_scale_inv = rowwise_scale_inv, columnwise_scale_inv

    def dequantize(self, copy: str) -> Tensor:
        data, scales = getattr(self, f"{copy}_data"), getattr(self, f"{copy}_scale_inv")
        assert data.dtype == scales.dtype == torch.uint8 and data.shape == self.shape
        (rows, width), rowwise = self.shape, copy == "_rowwise"
        tiles, used = ((128, 4), (rows, width // 32)) if rowwise else ((4, 128), (rows // 32, width))
        assert tuple(scales.shape) == tuple(-(-size // tile) * tile for size, tile in zip(used, tiles, strict=True))
        scales = scales[: used[0], : used[1]]
        return Quantized(data.view(E4M3), scales, ROWWISE if rowwise else COLUMNWISE).dequantize()


class GroupedTensorStorage:
    def __init__(
        self,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        num_tensors: int,
        columnwise_data: Tensor,
        columnwise_scale_inv: Tensor,
        with_gemm_swizzled_scales: bool,
    ) -> None:
        assert with_gemm_swizzled_scales
        self.logical_shape, self.num_tensors = shape, num_tensors
        self.columnwise_data, self.columnwise_scale_inv = columnwise_data, columnwise_scale_inv

    def dequantize(self) -> Tensor:
        rows, width = self.logical_shape
        scales = self.columnwise_scale_inv.view(rows // 32, -1)[:, :width]
        return Quantized(self.columnwise_data.view(rows, width).view(E4M3), scales, COLUMNWISE).dequantize()


def columns(value: Tensor) -> GroupedTensorStorage:
    """Quantized down the columns, with scales in some order of whole tiles."""
    copy = quantize(value, COLUMNWISE)
    scales = torch.nn.functional.pad(copy.scales, (0, -value.shape[1] % 128))
    return GroupedTensorStorage(
        shape=tuple(value.shape),  # type: ignore[arg-type]
        dtype=value.dtype,
        num_tensors=1,
        columnwise_data=copy.data.view(torch.uint8).reshape(-1),
        columnwise_scale_inv=scales.reshape(-1),
        with_gemm_swizzled_scales=True,
    )


def _cudnn_compute_wgrad(
    grouped_x: GroupedTensorStorage,
    grouped_dy: GroupedTensorStorage,
    wgrad_output: list[Tensor],
    weight_shape: tuple[int, int],
    offsets: Tensor,
    accumulate: bool,
    wgrad_kernel_fn: str,
    single_grouped_weight: bool,
    use_nvfp4: bool,
    data_dtype: torch.dtype,
    scale_view_dtype: torch.dtype,
    sf_vec_size: int,
) -> None:
    assert wgrad_kernel_fn == "kernel" and offsets.dtype == torch.int32 and sf_vec_size == 32
    assert not accumulate and not single_grouped_weight and not use_nvfp4
    assert (data_dtype, scale_view_dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    found = TorchExperts().weight_gradient(grouped_dy.dequantize(), grouped_x.dequantize(), offsets)
    assert found.shape[1:] == weight_shape
    for place, gradient in zip(wgrad_output, found, strict=True):
        place.copy_(gradient)


@dataclass
class OperationContext:
    saved_tensors: Any = None
    to_save: Any = None
    requires_grad: bool = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.to_save = tensors


class WeightGradStore:
    def __init__(self, delay_wgrad_compute: bool) -> None:
        self.context: Queue[Any] | None = Queue() if delay_wgrad_compute else None

    def put(self, tensor_list: list[Any], func: Any) -> None:
        assert self.context is not None
        self.context.put([tensor_list, func])
