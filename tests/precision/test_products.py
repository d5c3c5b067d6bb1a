"""Products of quantized matrices: the values, the operands of scaled GEMMs, and training against plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxshard
from fxshard.kernels import mxfp8_products as products
from fxshard.kernels.mxfp8 import COLUMNWISE, ROWWISE, Quantized, quantize
from fxshard.kernels.mxfp8_ops import mxfp8_mm
from tests.precision.nets import VOCAB, Net, net
from tests.precision.scalar import swizzled_index
from tests.thorough import thorough
from tests.toy import batch

BF16 = torch.bfloat16


def multiply(a: Quantized, b: Quantized) -> torch.Tensor:
    return mxfp8_mm(a.data, a.scales, b.data, b.scales, a.axis, b.axis, torch.float32)


@pytest.mark.parametrize("tokens", [64, 50])
def test_the_three_products_of_a_linear(tokens: int) -> None:
    x, w, dy = torch.randn(tokens, 64), torch.randn(96, 64), torch.randn(tokens, 96)
    pairs = [
        (multiply(quantize(x, ROWWISE), quantize(w, ROWWISE)), x @ w.t()),
        (multiply(quantize(dy, ROWWISE), quantize(w, COLUMNWISE)), dy @ w),
        (multiply(quantize(dy, COLUMNWISE), quantize(x, COLUMNWISE)), dy.t() @ x),
    ]
    for product, exact in pairs:
        assert (product - exact).norm() / exact.norm() < 0.06


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, _: Any, b_scales: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """What torch's scaled GEMM is documented to do, and what it demands of its operands, on the CPU."""
    assert a.is_contiguous() and b.t().is_contiguous(), "row-major times column-major"
    assert a.shape[1] == b.shape[0] and a.shape[1] % 32 == 0
    assert kwargs["swizzle_a"] == kwargs["swizzle_b"] == F.SwizzleType.SWIZZLE_32_4_4
    left, right = (
        Quantized(m, s.view(torch.uint8)[swizzled_index(m.shape[0], m.shape[1] // 32)], ROWWISE).dequantize()
        for m, s in ((a, a_scales), (b.t(), b_scales))
    )
    return (left @ right.t()).to(kwargs["output_dtype"])


@pytest.mark.shows("Q11")
@pytest.mark.parametrize("tokens", [64, 50])
def test_scaled_gemms_get_the_same_values(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of compute capability 10 with torch's GEMM replaced: swizzling happens next to it, and nowhere else."""
    x, w, dy = torch.randn(tokens, 64), torch.randn(160, 64), torch.randn(tokens, 160)
    pairs = [
        (quantize(x, ROWWISE), quantize(w, ROWWISE)),
        (quantize(dy, ROWWISE), quantize(w, COLUMNWISE)),
        (quantize(dy, COLUMNWISE), quantize(x, COLUMNWISE)),
    ]
    expected = [multiply(a, b) for a, b in pairs]
    monkeypatch.setattr(products, "scaled_products", lambda device: True)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    for (a, b), want in zip(pairs, expected, strict=True):
        torch.testing.assert_close(multiply(a, b), want, rtol=1e-5, atol=1e-5)


class Reference(torch.autograd.Function):
    """A linear in MXFP8 as one would write it by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return (quantize(x, ROWWISE).dequantize() @ quantize(w, ROWWISE).dequantize().t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        dx = quantize(dy, ROWWISE).dequantize() @ quantize(w, COLUMNWISE).dequantize()
        dw = quantize(dy, COLUMNWISE).dequantize().t() @ quantize(x, COLUMNWISE).dequantize()
        return dx.to(x.dtype), dw.to(w.dtype)


class ByHand(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Reference.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def by_hand() -> Net:
    """The same model in bf16 whose blocks multiply in MXFP8 by hand."""
    model = net().to(BF16)
    assert isinstance(model, Net)
    for layer in model.layers:
        layer.up, layer.down = ByHand(layer.up), ByHand(layer.down)
    return model


def test_linears_right_behind_one_another() -> None:
    """The result of a product is the operand of the next, with nothing in between."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
    first, second = (linear.weight.detach().to(BF16).requires_grad_() for linear in plain)
    x = torch.randn(8, 32)
    Reference.apply(Reference.apply(x.to(BF16), first), second).sum().backward()
    model = fxshard.compile(plain, precision=fxshard.MXFP8(), lowering="eager")
    model(x).sum().backward()
    for mine, theirs in zip(model.parameters(), (first, second), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad.to(BF16), theirs.grad)


@pytest.mark.parametrize(("gather", "zero"), [("off", 0), ("auto", 3), thorough("off", 3), thorough("auto", 0)])
def test_gradients_equal_plain_autograd(zero: int, gather: str) -> None:
    precision = fxshard.MXFP8(gather=gather)
    model = fxshard.compile(net(), zero=zero, precision=precision, lowering="eager")
    reference = by_hand()
    x, y = batch(0, 1, 0, VOCAB, size=3, length=14)  # 42 tokens: a short last block
    mine, theirs = model(x, y), reference(x, y)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    mine.backward()
    theirs.backward()
    written = [node for node in model.graphs["backward"].graph.nodes if "mm_into" in str(node.target)]
    assert len(written) == 4  # straight into the bucket, all of them
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        quantized = name.endswith(("up.weight", "down.weight"))
        # Those of quantized weights are not rounded to bf16 before they are reduced in fp32.
        assert not quantized or not torch.equal(grads[name], grads[name].to(BF16).float())
        torch.testing.assert_close(grads[name].to(BF16), parameter.grad, rtol=0, atol=0)
    with torch.no_grad():
        assert torch.equal(model(x, y), mine)  # evaluation multiplies the same values
