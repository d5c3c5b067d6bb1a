"""Experts whose whole step is Transformer Engine's: its grouped MLP in MXFP8, fused, on the parameters' own memory.

Graphs call the fused operation phase by phase (``te_mlp_op``). This is the operator outside of them, where nothing can
be kept: ``transformer_engine.pytorch.ops.Sequential`` keeps what its backward needs where no operator can see it. So
backward computes forward again, and gives the gradients of tokens, routing weights, weights and biases at once. The
operations are built without memory, once for all experts of a shape; parameters are lent to them for a call.

Under another recipe, or none (bf16), the same operations run one by one on devices that the fused kernel does not know.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxshard._torch.errors import ConfigError
from fxshard.kernels.by_te import engine
from fxshard.kernels.by_torch import Call, Experts, Gradients, TorchExperts
from fxshard.kernels.glu import Glu
from fxshard.kernels.te_gates import KERNEL, fused_operation


class FusedGroupedMlp(TorchExperts):
    """The implementation ``te-mxfp8``."""

    alignment = 128
    recomputes = True

    def __init__(self, recipe: Any = None) -> None:
        """``recipe``: ``mxfp8_recipe()``, another one of Transformer Engine's that has no state, or None: bf16."""
        self.recipe = recipe
        self.fuses = self.takes_quantized = recipe is not None and recipe.mxfp8()
        self._built: dict[Form, _GroupedMlp] = {}

    def forward(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        rows = self._rows(x, call.offsets)
        mlp = self._mlp(x, call)
        with torch.no_grad(), mlp.lent(call.experts):
            out = self._run(mlp, _tokens(x, rows), call, _scales(call, x)[:rows])
        return _spread(out, x.shape[0]), x.new_empty(0), x.new_empty(0)

    def gradients(self, grad: Tensor, x: Tensor, call: Call) -> Gradients:
        rows = self._rows(x, call.offsets)
        mlp = self._mlp(x, call)
        with torch.enable_grad(), mlp.lent(call.experts) as parameters:
            tokens, scales = _tokens(x, rows).requires_grad_(), _scales(call, x)[:rows].requires_grad_()
            out = self._run(mlp, tokens, call, scales)
            inputs = tokens, scales, *(each for stack in parameters for each in stack)
            grad_x, grad_scales, *found = torch.autograd.grad(out, inputs, grad[:rows].contiguous())
        stacks = iter([_stack(found[i : i + mlp.form.experts]) for i in range(0, len(found), mlp.form.experts)])
        gate, down = next(stacks).mT, next(stacks).mT
        return Gradients(
            x=_spread(grad_x, x.shape[0]),
            gate=gate,
            down=down,
            gate_bias=next(stacks) if call.experts.gate_bias is not None else None,
            down_bias=next(stacks) if call.experts.down_bias is not None else None,
            weights=_spread(grad_scales, x.shape[0]) if call.weights is not None else None,
        )

    def _rows(self, x: Tensor, offsets: Tensor) -> int:
        """How many rows to give: the fused kernel skips those of no expert, the operations one by one do not."""
        return x.shape[0] if self.fuses else int(offsets[-1])

    def _run(self, mlp: _GroupedMlp, x: Tensor, call: Call, scales: Tensor) -> Tensor:
        counts = call.offsets.long().diff(prepend=call.offsets.new_zeros(1).long())
        more = (scales,) if mlp.form.scales_bias else ()
        with engine().module("quantization").autocast(enabled=self.recipe is not None, recipe=self.recipe):
            # Not a call: hooks that others set on all modules (torch's FLOP counter does) are not for what is in here.
            out: Tensor = mlp.sequential.forward(x, counts, scales, counts, *more)
        if self.fuses:
            mlp.check_fused()
        return out

    def _mlp(self, x: Tensor, call: Call) -> _GroupedMlp:
        form = Form.of(x, call)
        if form not in self._built:
            with torch.inference_mode(False):  # a parameter that is made there could never be trained
                self._built[form] = _GroupedMlp(form)
        return self._built[form]


def mxfp8_recipe() -> Any:
    """MXFP8 as the fused kernel takes it: E4M3 in backward, too."""
    recipe = importlib.import_module("transformer_engine.common.recipe")
    return recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E4M3)


@dataclass(frozen=True)
class Form:
    """What operations are built for. Experts of one form take turns with them."""

    experts: int
    width: int
    inner: int
    out: int
    glu: Glu
    biased: tuple[bool, bool]
    scales_bias: bool
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor, call: Call) -> Form:
        gate, down, second = call.experts.gate, call.experts.down, call.experts.down_bias is not None
        biased = call.experts.gate_bias is not None, second
        scales_bias = second and call.weighted_bias and call.weights is not None
        sizes = gate.shape[0], gate.shape[1], down.shape[1], down.shape[2]
        return Form(*sizes, call.glu, biased, scales_bias, x.dtype, x.device)


class _GroupedMlp:
    """Transformer Engine's three operations. They hold parameters of no size, but for the time of a call."""

    def __init__(self, form: Form) -> None:
        ops = engine().module("ops")
        self.form = form
        options = {"device": "meta", "dtype": form.dtype}
        first, second = form.biased
        self._first = ops.GroupedLinear(form.experts, form.width, 2 * form.inner, bias=first, **options)
        self._second = ops.GroupedLinear(
            form.experts, form.inner, form.out, bias=second, scale_bias=form.scales_bias, **options
        )
        self.sequential = ops.Sequential(self._first, grouped_activation(ops, form.glu), self._second)
        self._nothing = torch.empty(0, dtype=form.dtype, device=form.device)
        self._parameters = [self._attach(self._first, "weight"), self._attach(self._second, "weight")]
        if first:
            self._parameters.append(self._attach(self._first, "bias"))
        if second:
            self._parameters.append(self._attach(self._second, "bias"))
        self._checked: set[bool] = set()

    def _attach(self, operation: Any, name: str) -> list[nn.Parameter]:
        parameters = [nn.Parameter(self._nothing) for _ in range(self.form.experts)]
        for i, parameter in enumerate(parameters):
            setattr(operation, f"{name}{i}", parameter)
        return parameters

    @contextmanager
    def lent(self, experts: Experts) -> Iterator[list[list[nn.Parameter]]]:
        """The operations with these weights (and biases): of each stack the parameters, one per expert.

        The operations keep the list of their parameters from their first run, so it is the memory of those parameters
        that changes. It is given back: what a unit gathered must not live on because of a parameter.
        """
        weights = [_matrices(experts.gate), _matrices(experts.down)]
        biases = [bias.detach().unbind(0) for bias in (experts.gate_bias, experts.down_bias) if bias is not None]
        for parameters, stack in zip(self._parameters, weights + biases, strict=True):
            for parameter, matrix in zip(parameters, stack, strict=True):
                parameter.data = matrix
        try:
            yield self._parameters
        finally:
            for parameters in self._parameters:
                for parameter in parameters:
                    parameter.data = self._nothing

    def check_fused(self) -> None:
        """Transformer Engine runs the operations one by one where it cannot fuse them, and says nothing."""
        backward = torch.is_grad_enabled()
        if backward in self._checked:
            return
        groups = getattr(self.sequential, "_module_groups", None) or ()
        kinds = ("_forward_ops", "_backward_ops") if backward else ("_forward_ops",)
        for kind in kinds:
            ran = [operation for group in groups for operation, _ in getattr(group, kind, ())]
            kernel = fused_operation()
            if kernel is None or not any(isinstance(operation, kernel) for operation in ran):
                names = ", ".join(type(operation).__name__ for operation in ran) or "nothing that can be seen"
                form = self.form
                raise ConfigError(
                    f'experts="te-mxfp8": Transformer Engine {engine().version} did not fuse {form.experts} experts, '
                    f"hidden size {form.width}, inner size {form.inner}, {form.glu.name}: it ran {names}, "
                    f'not {KERNEL}; use experts="auto"'
                )
        self._checked.add(backward)


def grouped_activation(ops: Any, glu: Glu) -> Any:
    size = glu.interleave or None
    if glu.name == "SwiGLU":
        return ops.ScaledSwiGLU(glu_interleave_size=size)
    constants = {"limit": glu.limit, "alpha": glu.alpha, "glu_linear_offset": glu.offset}
    return ops.ScaledClampedQGeGLU(glu_interleave_size=size, **constants)


def _matrices(weight: Tensor) -> tuple[Tensor, ...]:
    """Each expert's matrix as [out, in], in the memory of ``weight``."""
    matrices: tuple[Tensor, ...] = weight.detach().mT.unbind(0)
    if not matrices[0].is_contiguous():
        strides = tuple(weight.stride())
        raise ConfigError(
            f'experts="te-mxfp8": Transformer Engine reads weights that lie [experts, out, in], and this one of shape '
            f'{tuple(weight.shape)} has strides {strides}; use experts="auto"'
        )
    return matrices


def _tokens(x: Tensor, rows: int) -> Tensor:
    return x[:rows].contiguous().detach()


def _scales(call: Call, x: Tensor) -> Tensor:
    return call.weights.detach() if call.weights is not None else x.new_ones(x.shape[0])


def _spread(values: Tensor, rows: int) -> Tensor:
    """Padded with zeros at the end, up to so many rows."""
    if values.shape[0] == rows:
        return values
    spread = values.new_zeros(rows, *values.shape[1:])
    spread[: values.shape[0]] = values
    return spread


def _stack(parts: list[Tensor]) -> Tensor:
    """One tensor of all experts' gradients: without a copy where they already lie one after the other."""
    first = parts[0]
    begin, size, storage = first.storage_offset(), first.numel(), first.untyped_storage().data_ptr()
    for i, part in enumerate(parts):
        place = part.untyped_storage().data_ptr(), part.storage_offset()
        if not part.is_contiguous() or place != (storage, begin + i * size):
            return torch.stack(parts)
    return first.as_strided((len(parts), *first.shape), (size, *first.stride()))
