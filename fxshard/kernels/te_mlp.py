"""Transformer Engine's fused grouped MLP, phase by phase, on weights that are quantized already.

The fused operation is called as Transformer Engine's own autograd calls it, with contexts of ours. What it would keep
for backward comes out as tensors, and goes back in: nothing is computed twice, and no weight is quantized here. Weight
gradients are left undone in backward, as its option to delay them does, and are a call of their own.

What its contexts hold was read in the source of 2.20.2, and is checked where it can be. None of this was run on a
device that the kernels are for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fxshard._torch.errors import ConfigError
from fxshard.kernels.by_te import engine
from fxshard.kernels.by_torch import Call, TorchExperts
from fxshard.kernels.glu import Glu
from fxshard.kernels.mxfp8 import BLOCK, ROWWISE, Quantized
from fxshard.kernels.te_gates import fused_operation

BEFORE_TOKENS = 7
"""What the operation saves before the quantized tokens: where experts begin and end, in several units."""


class TeMxfp8Experts(TorchExperts):
    """The implementation ``te-mxfp8``. In graphs ``te_mlp_op`` takes its place; there is nothing to call outside."""

    alignment = 128
    recomputes = True
    takes_quantized = True

    def forward(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        raise ConfigError(
            'experts="te-mxfp8" runs in graphs that fxshard compiles, and fxshard::grouped_swiglu was called outside '
            'of one: compile the model (fxshard.compile, backend="fxshard"), or ask this call for "torch"'
        )


@dataclass(frozen=True)
class Form:
    """What an operation is built for. Experts of one form take turns with it."""

    experts: int
    width: int
    inner: int
    out: int
    glu: Glu
    biased: tuple[bool, bool]
    scales_bias: bool
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Weights:
    """Both stacks, ``[experts, out, in]``, rowwise for forward and columnwise for backward, and their biases."""

    gate: Quantized
    down: Quantized
    gate_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True)
class Columns:
    """Tokens quantized down each expert's, as products over tokens read them."""

    data: Tensor
    scales: Tensor


def scale_bytes(tokens: Any, width: int) -> Any:
    """Of so many tokens, quantized down the columns: tiles of 128 columns and four blocks."""
    return tokens // BLOCK * (-(-width // 128) * 128)


class FusedMlp:
    """The operation for experts of one form. They take turns with it; it holds weights for the time of a call."""

    def __init__(self, form: Form) -> None:
        ops = engine().module("ops")
        self.form = form
        options = {"device": "meta", "dtype": form.dtype, "delay_wgrad_compute": True}
        first, second = form.biased
        self._first = ops.GroupedLinear(form.experts, form.width, 2 * form.inner, bias=first, **options)
        self._second = ops.GroupedLinear(
            form.experts, form.inner, form.out, bias=second, scale_bias=form.scales_bias, **options
        )
        for linear, biased in ((self._first, first), (self._second, second)):
            linear.reset_recipe_state(recipe=mxfp8_recipe())
            for name in ("weight", "bias") if biased else ("weight",):
                for i in range(form.experts):  # plain attributes from now on: what is lent is no parameter
                    delattr(linear, f"{name}{i}")
        activation = grouped_activation(ops, form.glu)
        # It says itself where it is not supported. Nothing runs unfused: there is no sequence that could.
        self._fused = fused_operation()(fc1=self._first, activation=activation, fc2=self._second)

    def forward(
        self, x: Tensor, offsets: Tensor, weights: Weights, scales: Tensor, trains: bool
    ) -> tuple[Tensor, Columns, Tensor, Columns] | Tensor:
        """The result and, for backward, tokens, pre-activations and activations; in evaluation the result alone."""
        self._lend(weights, trains)
        contexts = [engine().module("ops.op").OperationContext(requires_grad=trains) for _ in range(3)]
        counts = offsets.long().diff(prepend=offsets.new_zeros(1).long())
        more = (scales,) if self.form.scales_bias else ()
        try:
            out, _ = self._fused.fuser_forward(
                contexts,
                x.contiguous(),
                basic_op_extra_inputs=[(counts,), (scales,), (counts, *more)],
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                basic_op_kwargs=[{}, {}, {}],
            )
        finally:
            self._take_back()
        if not trains:
            return out
        saved, experts = contexts[0].to_save, self.form.experts
        if saved is None or len(saved) != BEFORE_TOKENS + 4 + 2 * experts:
            raise self._unknown(f"it saves {len(saved or ())} tensors for backward")
        tokens, pre, hidden = (
            saved[BEFORE_TOKENS],
            saved[BEFORE_TOKENS + 1 + experts],
            saved[BEFORE_TOKENS + 3 + experts],
        )
        return out, self._columns(tokens, self.form.width), pre, self._columns(hidden, self.form.inner)

    def backward(
        self, grad: Tensor, offsets: Tensor, weights: Weights, scales: Tensor, pre: Tensor
    ) -> tuple[Tensor, Tensor, Columns, Columns, list[Tensor | None]]:
        """Gradients of tokens and routing weights, of both products' results quantized, and of biases."""
        form = self.form
        first, second = (engine().module("ops.op").OperationContext() for _ in range(2))
        ends = offsets.long()
        begins = torch.cat((ends.new_zeros(1), ends))
        strides = (form.width, 2 * form.inner, form.inner, form.out)
        places = (ends.diff(prepend=ends.new_zeros(1)), begins, ends.int(), *(begins * stride for stride in strides))
        self._lend(weights, True)
        lent = [[getattr(each, f"weight{i}") for i in range(form.experts)] for each in (self._first, self._second)]
        first.saved_tensors = (*places, None, *lent[0], pre, scales, None, *lent[1])
        for context, linear in ((first, self._first), (second, self._second)):
            context.grad_output_quantizers = [linear.get_quantizer("backward", 0)]
            context.input_quantizers = [linear.get_quantizer("forward", 0)]
            context.dtype = form.dtype
            context.input_requires_grad = context.weight_requires_grad = True
        first.unit_activation_scale, first.dgrad_out, second.recompute_input_from_dsrelu = False, None, False
        try:
            grad_x, grads, extra = self._fused.fuser_backward([first, None, second], grad.contiguous())
        finally:
            self._take_back()
        of_pre, of_out = (self._delayed(linear) for linear in (self._first, self._second))
        biases: list[Tensor | None] = [
            torch.stack(list(found[form.experts :])) if biased else None
            for found, biased in zip((grads[0], grads[2]), form.biased, strict=True)
        ]
        grad_scales = extra[1][0].to(scales.dtype)
        return grad_x, grad_scales, self._columns(of_pre, 2 * form.inner), self._columns(of_out, form.out), biases

    def _lend(self, weights: Weights, trains: bool) -> None:
        pairs = ((self._first, weights.gate, weights.gate_bias), (self._second, weights.down, weights.down_bias))
        for linear, stack, bias in pairs:
            for i in range(self.form.experts):
                matrix = _matrix(Quantized(stack.data[i], stack.scales[i], stack.axis), linear, self.form.dtype, trains)
                setattr(linear, f"weight{i}", matrix)
                if bias is not None:
                    setattr(linear, f"bias{i}", bias[i])

    def _take_back(self) -> None:
        """What a unit gathered must not live on because of an operation."""
        for linear, biased in zip((self._first, self._second), self.form.biased, strict=True):
            for name in ("weight", "bias") if biased else ("weight",):
                for i in range(self.form.experts):
                    delattr(linear, f"{name}{i}")

    def _delayed(self, linear: Any) -> Any:
        """The gradient that was put aside for a weight's, quantized. The product that waits with it is not run."""
        (_, gradient, _), _ = linear.wgrad_store.context.get_nowait()
        return gradient

    def _columns(self, tokens: Any, width: int) -> Columns:
        data, scales = tokens.columnwise_data.view(torch.uint8).view(-1, width), tokens.columnwise_scale_inv
        scales = scales.reshape(-1).view(torch.uint8)
        if scales.numel() != scale_bytes(data.shape[0], width):
            raise self._unknown(f"it gives {scales.numel()} scales for {data.shape[0]} tokens of {width} values")
        return Columns(data, scales)

    def _unknown(self, found: str) -> ConfigError:
        return ConfigError(
            f'experts="te-mxfp8": the fused grouped MLP of Transformer Engine {engine().version} is not the one that '
            f'fxshard knows (2.20): {found}; use experts="auto"'
        )


@cache
def fused_mlp(form: Form) -> FusedMlp:
    return FusedMlp(form)


def weight_gradient(of_out: Columns, tokens: Columns, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """``of_outᵀ tokens`` over the tokens of each expert: ``[experts, out, in]``."""
    storage = engine().module("tensor.storage.grouped_tensor_storage").GroupedTensorStorage
    experts, (rows, out), width = offsets.shape[0], of_out.data.shape, tokens.data.shape[1]

    def grouped(columns: Columns, width: int) -> Any:
        return storage(
            shape=(rows, width),
            dtype=dtype,
            num_tensors=experts,
            columnwise_data=columns.data.view(-1),
            columnwise_scale_inv=columns.scales,
            with_gemm_swizzled_scales=True,
        )

    made = torch.empty(experts, out, width, dtype=dtype, device=offsets.device)
    engine().module("ops.fused.grouped_mlp")._cudnn_compute_wgrad(
        grouped(tokens, width),
        grouped(of_out, out),
        list(made.unbind(0)),
        weight_shape=(out, width),
        offsets=offsets.int(),
        accumulate=False,
        wgrad_kernel_fn=fused_operation().grouped_gemm_wgrad_kernel(),
        single_grouped_weight=False,
        use_nvfp4=False,
        data_dtype=torch.float8_e4m3fn,
        scale_view_dtype=torch.float8_e8m0fnu,
        sf_vec_size=BLOCK,
    )
    return made


def mxfp8_recipe() -> Any:
    """MXFP8 as the fused kernel takes it: E4M3 in backward, too."""
    recipe = importlib.import_module("transformer_engine.common.recipe")
    return recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E4M3)


def grouped_activation(ops: Any, glu: Glu) -> Any:
    size = glu.interleave or None
    if glu.name == "SwiGLU":
        return ops.ScaledSwiGLU(glu_interleave_size=size)
    constants = {"limit": glu.limit, "alpha": glu.alpha, "glu_linear_offset": glu.offset}
    return ops.ScaledClampedQGeGLU(glu_interleave_size=size, **constants)


def _matrix(copy: Quantized, linear: Any, dtype: torch.dtype, trains: bool) -> Any:
    """A copy of one matrix as Transformer Engine's tensor, in the same memory; its scales, a 32nd, are padded."""
    rowwise = copy.axis == ROWWISE
    tall, wide = (128, 4) if rowwise else (4, 128)
    rows, columns = copy.scales.shape
    given = copy.data.view(torch.uint8), pad(copy.scales, (0, -columns % wide, 0, -rows % tall))
    nothing = None, None
    (row_data, row_scales), (column_data, column_scales) = (given, nothing) if rowwise else (nothing, given)
    return (
        engine()
        .module("tensor.mxfp8_tensor")
        .MXFP8Tensor(
            shape=copy.data.shape,
            dtype=dtype,
            rowwise_data=row_data,
            rowwise_scale_inv=row_scales,
            columnwise_data=column_data,
            columnwise_scale_inv=column_scales,
            fp8_dtype=engine().module("constants").DType.kFloat8E4M3,
            quantizer=linear.get_quantizer("forward", 1),
            with_gemm_swizzled_scales=False,
            requires_grad=trains,
            device=copy.data.device,
        )
    )
