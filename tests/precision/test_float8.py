"""Float8: scales, casts and products from the definition, and training against plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxshard
from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.frontend.precision_report import report
from fxshard.kernels import float8
from fxshard.kernels import float8_products as products
from fxshard.kernels.float8 import Scaling
from fxshard.kernels.float8_ops import float8_cast_both, float8_mm, float8_quantize
from fxshard.planner.quantized import choose_linears
from tests.precision import float8_reference as reference
from tests.precision.nets import VOCAB, net, single
from tests.thorough import thorough
from tests.toy import batch

BF16 = torch.bfloat16
SCALINGS = ["tensor", "row", "block"]


def small(scaling: str = "tensor", **options: Any) -> fxshard.Float8:
    return fxshard.Float8(scaling=scaling, smallest=0, **options)


@pytest.mark.shows("F1")
@pytest.mark.parametrize("dtype", [float8.E4M3, float8.E5M2])
def test_scales_are_the_smallest_powers_of_two_that_fit(dtype: torch.dtype) -> None:
    largest = [0.0, 1e-45, 1e-38, 2.0**-120, 0.1, 1.0, 447.99997, 448.0, 448.00003, 57344.0, 57344.004, 3e38]
    largest += torch.logspace(-30, 30, 999).tolist()
    found = float8.scales_of(torch.tensor(largest), dtype)
    for value, scale in zip(torch.tensor(largest).tolist(), found.tolist(), strict=True):
        assert scale == reference.scale(value, dtype), value
    assert torch.equal(float8.reciprocals(found), 1 / found)


@pytest.mark.shows("F1")
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("axis", [0, 1])
def test_quantized_values_are_those_of_the_definition(scaling: str, axis: int) -> None:
    torch.manual_seed(0)
    value = (torch.randn(256, 128) * torch.logspace(-12, 3, 256)[:, None]).to(BF16)
    value[3, 5], value[7] = 0.0, 0.0
    data, scales = float8_quantize(value, scaling, axis)
    expected = reference.quantized(value, reference.tiles(scaling, value.shape, axis, True), float8.E4M3)
    assert torch.equal(float8.dequantize(data, scales), expected)


def test_what_is_not_finite() -> None:
    value = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0]])
    kept = float8.dequantize(float8.cast(value, torch.ones(1, 1), float8.E4M3), torch.ones(1, 1))
    assert kept[0, :2].tolist() == [448.0, -448.0]
    assert kept[0, 2].isnan() and kept[0, 3] == 1.0


def test_both_copies_from_one_read() -> None:
    value = torch.randn(48, 32).to(BF16)
    scales = float8.scales_of(float8.largest_of(value, Scaling.TENSOR, 1), float8.E5M2)
    plain, turned = float8_cast_both(value, scales, float8.E5M2)
    assert turned.is_contiguous()
    assert torch.equal(plain.view(torch.uint8).t(), turned.view(torch.uint8))
    assert torch.equal(plain.view(torch.uint8), float8.cast(value, scales, float8.E5M2).view(torch.uint8))


@pytest.mark.shows("F1")
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("fast", [True, False])
def test_products_are_those_of_the_values(scaling: str, fast: bool) -> None:
    x, w = torch.randn(40, 256).to(BF16), torch.randn(128, 256).to(BF16)
    how = Scaling(scaling)
    scales = float8.scales_of(float8.largest_of(x, how, 1), float8.E4M3)
    product = float8_mm(float8.cast(x, scales, float8.E4M3), scales, *float8_quantize(w, scaling, 1), fast, BF16)
    assert torch.equal(product, reference.Product.apply(x, w, scaling, "fp8"))


def as_cublas_reads(scales: torch.Tensor, recipe: F.ScalingType, rows: int, columns: int) -> torch.Tensor:
    """A scale for each element, by what cuBLAS says about the order in which they lie in memory."""
    flat = scales.as_strided((scales.numel(),), (1,))
    found = torch.empty(rows, columns)
    for i in range(rows):
        for block in range(columns // 128):
            four = -(-(columns // 128) // 4) * 4
            at = block * rows + i if recipe == F.ScalingType.BlockWise1x128 else i // 128 * four + block
            found[i, 128 * block : 128 * (block + 1)] = flat[at]
    return found


@pytest.mark.shows("F1")
@pytest.mark.parametrize("tokens", [136, 130, 1])
@pytest.mark.parametrize(("inputs", "outputs"), [(640, 256), (128, 384)])
def test_blocks_lie_as_cublas_reads_them(tokens: int, inputs: int, outputs: int) -> None:
    """Operands of Hopper's products on the CPU: the values are the emulated ones, and torch accepts the layout."""
    x, w, dy = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)

    def quantized(value: torch.Tensor, weight: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        scales = float8.scales_of(float8.largest_of(value, Scaling.BLOCK, 1, weight=weight), float8.E4M3)
        return float8.cast(value, scales, float8.E4M3), scales

    pairs = [
        (quantized(x), quantized(w, True)),
        (quantized(dy), quantized(w.t().contiguous(), True)),
        (quantized(dy.t().contiguous()), quantized(x.t().contiguous())),
        (quantized(w, True), quantized(torch.randn(16, inputs))),
    ]
    for a, b in pairs:
        left, right, a_scales, a_recipe, b_scales, b_recipe = operands = products.block_operands(*a, *b)
        made = left.float() * as_cublas_reads(a_scales, a_recipe, *left.shape)
        made = made @ (right.t().float() * as_cublas_reads(b_scales, b_recipe, *right.t().shape)).t()
        exact = float8.dequantize(*a) @ float8.dequantize(*b).t()
        torch.testing.assert_close(made[: a[0].shape[0]], exact, rtol=1e-5, atol=1e-5)
        with FakeTensorMode():  # of a GPU's tensors torch checks shapes and strides
            fake: list[Any] = [
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda")
                if isinstance(each, torch.Tensor)
                else each
                for each in operands
            ]
            assert private.scaled_mm(*fake, dtype=torch.float32).shape == made.shape


def test_one_block_of_inputs_and_several_of_outputs() -> None:
    """With 128 inputs the scales of a weight's blocks are a column, as those of rows are."""
    x, w = torch.randn(40, 128).to(BF16), torch.randn(384, 128).to(BF16)
    scales = float8.scales_of(float8.largest_of(x, Scaling.BLOCK, 1), float8.E4M3)
    a, b = (float8.cast(x, scales, float8.E4M3), scales), float8_quantize(w, "block", 1)
    assert products.shared(*a, *b) is Scaling.BLOCK
    assert torch.equal(float8_mm(*a, *b, True, BF16), reference.Product.apply(x, w, "block", "fp8"))


@pytest.mark.shows("F1")
@pytest.mark.parametrize(
    ("scaling", "wgrad", "zero"),
    [thorough("tensor", "fp8", 0), ("tensor", "bf16", 3), ("row", "fp8", 3), ("block", "fp8", 3)],
)
def test_training_equals_plain_autograd(scaling: str, wgrad: str, zero: int) -> None:
    width = 2 if scaling == "block" else 1
    precision = small(scaling, weight_gradient=wgrad)
    model = fxshard.compile(single(width), zero=zero, precision=precision, lowering="eager")
    plain = reference.by_hand(scaling, wgrad, width)
    x, y = batch(0, 1, 0, VOCAB, size=3, length=14)
    mine, theirs = model(x, y), plain(x, y)
    assert torch.equal(mine, theirs)
    mine.backward()
    theirs.backward()
    assert any("float8_mm" in str(node.target) for node in model.graphs["backward"].graph.nodes)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert grads[name] is not None and parameter.grad is not None
        assert torch.equal(grads[name].to(BF16), parameter.grad), name
    with torch.no_grad():
        assert torch.equal(model(x, y), mine)  # evaluation multiplies the same values


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_tokens(scaling: str) -> None:
    """A linear that gets none has no result, and a gradient of zeros; that of others is theirs."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.some, self.none = nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.some(x).sum() + self.none(x[:0]).square().sum()

    model = fxshard.compile(Part(), precision=small(scaling), lowering="eager")
    x = torch.randn(4, 128)
    model(x).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    kept = reference.quantized(x.to(BF16), reference.tiles(scaling, x.shape, 0, False), float8.E4M3)
    assert torch.equal(grads["some.weight"], kept.sum(0).expand(128, 128))
    assert not any(grads[f"none.{name}"].any() for name in ("weight", "bias"))


def test_what_is_chosen_and_why_not() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.low, self.odd = nn.Linear(1024, 1024), nn.Linear(1024, 64), nn.Linear(1024, 1030)

    chosen = choose_linears(Odd(), fxshard.Float8())
    assert chosen.weights == {"large.weight"}
    assert chosen.left_out["low"] == "its weight is 64 × 1024: too small to gain (60 is below smallest=384)"
    assert chosen.left_out["odd"] == "its weight is 1030 × 1024, and 16 does not divide both"
    assert choose_linears(Odd(), fxshard.Float8(linears=("low",))).weights == {"low.weight"}  # asked for by its name
    with pytest.raises(ConfigError, match=r"Float8\(linears=...\) names 'odd', which cannot be quantized"):
        choose_linears(Odd(), fxshard.Float8(linears=("odd",)))
    blocks = choose_linears(Odd(), fxshard.Float8(scaling="block", smallest=0))
    assert blocks.left_out["low"] == "its weight is 64 × 1024, and 128 does not divide both"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": "delayed"}, "scaling='delayed'.*expected one of 'tensor', 'row', 'block'"),
        ({"weight_gradient": "fp32"}, "weight_gradient='fp32'.*expected one of 'fp8', 'bf16'"),
        ({"gather": "staged"}, "gather='staged'.*expected one of"),
        ({"emulate": False}, "emulate=False.* on cpu: products would dequantize .*compute capability 8.9"),
        ({"param": torch.float16}, "what is quantized is bfloat16"),
        ({"smallest": 384}, "Float8 chooses no linear of Net .*too small to gain"),
    ],
)
def test_wrong_choices_fail_before_training(options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match=message):
        fxshard.compile(model, precision=fxshard.Float8(**{"smallest": 0, **options}))
    assert all(parameter.untyped_storage().nbytes() for parameter in model.parameters())


def test_the_report_says_what_runs_where() -> None:
    shown = str(report(fxshard.compile(net(), precision=small("row"), lowering="eager")))
    assert "Float8: 4 weights, 1 linears left in bf16" in shown
    assert "dequantize and multiply in float32 (cpu has no float8 product)" in shown


@pytest.mark.shows("F4")
@pytest.mark.parametrize("scaling", [thorough("tensor"), thorough("row"), "block"])
def test_casts_that_the_compiler_fuses_equal_separate_ones(scaling: str) -> None:
    """What produces a value, its largest magnitudes, scales and cast in one kernel, against operator by operator.

    By producers that round once: between operators that it fuses, a compiler keeps more bits than bf16 has, but what is
    measured and cast is rounded as memory would.
    """

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x * 1.3).relu() * 1.1) * 8

    x, factors = torch.randn(48, 128), torch.randn(48, 128)
    runs = []
    for lowering in ("eager", "inductor"):
        torch.manual_seed(0)
        model = fxshard.compile(Two(), precision=small(scaling), lowering=lowering)
        y = model(x)
        (y.float() * factors).sum().backward()
        runs.append([y.detach(), *(parameter.grad for parameter in model.parameters())])
    for eager, fused in zip(*runs, strict=True):
        assert eager is not None and torch.equal(eager, fused)
