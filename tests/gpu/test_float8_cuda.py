"""Float8 on a GPU: the cast kernel bit for bit, products within their rounding, and a step that Inductor compiled."""

from __future__ import annotations

import pytest
import torch

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.kernels import float8
from fxshard.kernels import float8_products as products
from fxshard.kernels.float8 import E4M3, E5M2, Scaling
from fxshard.kernels.float8_cast import cast_both, cast_plain, cast_turned
from fxshard.kernels.float8_grouped import float8_grouped_mm, float8_quantize_stack
from fxshard.kernels.float8_ops import float8_mm, float8_mm_into, float8_quantize, float8_transposed

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def values(rows: int, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    torch.manual_seed(0)
    made = torch.randn(rows, columns, device="cuda") * torch.logspace(-9, 6, rows, device="cuda")[:, None]
    made[rows // 2, columns // 2], made[0, 0], made[-1] = torch.nan, -torch.inf, 0.0
    return made.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN has two signs, and either will do."""
    wide = a.float(), b.float()
    return bool(((wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan())).all())


@pytest.mark.shows("F1", "F4")
@pytest.mark.parametrize("shape", [(256, 384), (200, 136), (16, 16)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [BF16, torch.float32])
def test_the_cast_kernel_is_the_definition(shape: tuple[int, int], dtype: torch.dtype, source: torch.dtype) -> None:
    value = values(*shape, source)
    finite = value.nan_to_num(0.0, 0.0, 0.0)
    for scaling in Scaling:
        for axis in (0, 1):
            for weight in (False, True):
                scales = float8.scales_of(float8.largest_of(finite, scaling, axis, weight=weight).bfloat16(), dtype)
                expected = float8.cast(value.to(BF16), scales, dtype)
                plain, turned = cast_both(value, scales, dtype)
                assert same(plain, expected) and same(cast_plain(value, scales, dtype), expected)
                assert same(turned.t(), expected) and same(cast_turned(value, scales, dtype).t(), expected)


@pytest.mark.shows("F1")
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("rows", [512, 200])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_products_are_those_of_the_values(scaling: str, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(size, 256, device="cuda", dtype=BF16) for size in (rows, 384))
    scales = float8.scales_of(float8.largest_of(x, Scaling(scaling), 1), E5M2 if scaling == "tensor" else E4M3)
    data = float8.cast(x, scales, E5M2 if scaling == "tensor" else E4M3)
    copy = float8_quantize(w, scaling, 1)
    exact = float8.dequantize(data, scales).double() @ float8.dequantize(*copy).double().t()
    for fast in (False, True):
        product = float8_mm(data, scales, *copy, fast, dtype)
        assert product.dtype == dtype
        assert (product.double() - exact).norm() / exact.norm() < 4e-3
    turned = cast_turned(x, scales, data.dtype) if scaling == "tensor" else None
    if turned is not None:  # a weight gradient: tokens are summed over, of which 16 need not divide the number
        own = float8.scales_of(float8.largest_of(x, Scaling.TENSOR, 1), E4M3)  # at most one operand is E5M2
        again = float8_mm(turned, scales, cast_turned(x, own, E4M3), own, False, torch.float32)
        left = float8.dequantize(data, scales).double()
        exact = left.t() @ float8.dequantize(float8.cast(x, own, E4M3), own).double()
        assert (again.double() - exact).norm() / exact.norm() < 1e-3


@pytest.mark.shows("F1")
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(512, 256, 384), (202, 128, 384), (129, 640, 256), (64, 512, 128)]
)
def test_the_three_products_with_a_scale_per_block(tokens: int, inputs: int, outputs: int) -> None:
    """By cuBLAS on Hopper: forward, gradient of the input, and of the weight, also written where it stays."""

    def quantized(value: torch.Tensor, weight: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        scales = float8.scales_of(float8.largest_of(value, Scaling.BLOCK, 1, weight=weight), E4M3)
        return float8.cast(value, scales, E4M3), scales

    torch.manual_seed(0)
    x, w, dy = (torch.randn(size, device="cuda") for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    x[:, ::3] *= 1e4  # blocks differ in their scales
    w[128:] *= 1e-3
    pairs = [
        (quantized(x), quantized(w, True)),
        (quantized(dy), quantized(w.t().contiguous(), True)),
        (quantized(dy.t().contiguous()), quantized(x.t().contiguous())),
    ]
    for a, b in pairs:
        exact = float8.dequantize(*a).double() @ float8.dequantize(*b).double().t()
        one = a[0].shape[1] <= 128  # block: those are rows, of which products are rounded to bf16
        for dtype, error in ((BF16, 4e-3), (torch.float32, 4e-3 if one else 1e-3)):
            product = float8_mm(*a, *b, True, dtype)
            assert product.dtype == dtype and product.shape == exact.shape
            assert (product.double() - exact).norm() / exact.norm() < error
            into = torch.full(exact.shape, torch.nan, dtype=dtype, device="cuda")
            float8_mm_into(*a, *b, True, into)
            assert torch.equal(into, product)
    if torch.cuda.get_device_capability()[0] == 9:
        assert "scaled_mm" in products.path(torch.device("cuda", 0), Scaling.BLOCK)


@pytest.mark.shows("F1")
@pytest.mark.parametrize("counts", [[64, 128, 0, 192], [5, 0, 70, 13]])
def test_products_of_experts(counts: list[int]) -> None:
    torch.manual_seed(0)
    tokens, experts, inputs, outputs = sum(counts), len(counts), 256, 384
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    w = torch.randn(experts, outputs, inputs, device="cuda", dtype=BF16)
    for axis, size in ((1, inputs), (0, outputs)):
        x = torch.randn(tokens, size, device="cuda", dtype=BF16) * torch.logspace(-3, 3, tokens, device="cuda")[:, None]
        scales = float8.scales_of(float8.largest_of(x, Scaling.ROW, 1), E4M3)
        data, (stack, of_rows) = float8.cast(x, scales, E4M3), float8_quantize_stack(w, axis)
        product = float8_grouped_mm(data, scales, stack, of_rows, ends)
        begin = 0
        for e, count in enumerate(counts):
            matrix = w[e] if axis else w[e].t().contiguous()
            own = float8.scales_of(float8.largest_of(matrix, Scaling.ROW, 1), E4M3)
            assert torch.equal(of_rows[e], own[:, 0]) and same(stack[e], float8.cast(matrix, own, E4M3))
            some = slice(begin, begin + count)
            exact = float8.dequantize(data[some], scales[some]).double() @ float8.dequantize(stack[e], own).double().t()
            assert count == 0 or (product[some].double() - exact).norm() / exact.norm() < 4e-3
            begin += count


def trained(precision: fxshard.Precision, lowering: str = "inductor", steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(LlamaConfig(vocab=512, dim=256, layers=2, heads=4, hidden=512))
        tokens = torch.randint(512, (2, 128))
    sharded = fxshard.compile(model, precision=precision, optimizer=fxshard.AdamW(lr=1e-3), lowering=lowering)
    losses = []
    for _ in range(steps):
        loss = sharded(tokens, tokens)
        loss.backward()
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.shows("F7")
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_training_follows_bf16(scaling: str, wgrad: str) -> None:
    plain = trained(fxshard.Precision(param=BF16, reduce=torch.float32))
    quantized = fxshard.Float8(scaling=scaling, weight_gradient=wgrad, smallest=0)
    assert trained(quantized) == pytest.approx(plain, rel=0.02)
    gathered = fxshard.Float8(scaling=scaling, weight_gradient=wgrad, smallest=0, gather="bf16")
    assert trained(gathered) == trained(quantized)


@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (144, 272), (1, 16)])
def test_bytes_are_transposed(rows: int, columns: int) -> None:
    data = torch.randint(256, (rows, columns), device="cuda", dtype=torch.uint8).view(E4M3)
    assert torch.equal(float8_transposed(data).view(torch.uint8), data.view(torch.uint8).t())
