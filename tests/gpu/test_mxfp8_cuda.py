"""On a GPU: the Triton quantizer writes the bytes of the torch version, and training in MXFP8 works."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.kernels.mxfp8 import COLUMNWISE, ROWWISE, Quantized, quantize
from fxshard.kernels.quantize import quantize_both, quantize_into, quantize_one, runs_on
from tests.precision.test_format import VECTORS

pytestmark = pytest.mark.gpu


def same(mine: Quantized, reference: Quantized) -> bool:
    return torch.equal(mine.scales.cpu(), reference.scales.cpu()) and torch.equal(
        mine.data.view(torch.uint8).cpu(), reference.data.view(torch.uint8).cpu()
    )


def any_bits(rows: int, columns: int) -> torch.Tensor:
    """Every kind of number there is: denormals, infinities and NaNs of both signs among them."""
    bits = np.random.default_rng(0).integers(0, 1 << 16, (rows, columns)).astype(np.uint16)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@pytest.mark.shows("Q1")
@pytest.mark.parametrize("shape", [(32, 32), (64, 256), (96, 1408), (1024, 4096), (50, 96), (1, 32), (33, 288)])
def test_the_kernel_writes_the_bytes_of_the_torch_version(shape: tuple[int, int]) -> None:
    assert runs_on(torch.device("cuda"))
    for value in (torch.randn(shape).to(torch.bfloat16), any_bits(*shape), torch.randn(shape), torch.zeros(shape)):
        reference = quantize(value, ROWWISE), quantize(value, COLUMNWISE)
        for mine, expected in zip(quantize_both(value.cuda()), reference, strict=True):
            assert same(mine, expected)
        for axis in (ROWWISE, COLUMNWISE):
            assert same(quantize_one(value.cuda(), axis), reference[1 - axis])


def test_the_torch_version_writes_the_same_bytes_on_both_devices() -> None:
    value = any_bits(256, 256)
    for axis in (ROWWISE, COLUMNWISE):
        assert same(quantize(value.cuda(), axis), quantize(value, axis))


def test_into_memory_that_is_there() -> None:
    value = any_bits(64, 96)
    made = quantize_both(torch.zeros(64, 96, device="cuda"))
    quantize_into(value.cuda(), None, made[1])
    assert same(made[0], quantize(torch.zeros(64, 96), ROWWISE))
    assert same(made[1], quantize(value, COLUMNWISE))


@pytest.mark.shows("Q1")
def test_the_kernel_equals_transformer_engine() -> None:
    file = np.load(VECTORS)
    for name in ("normal", "one_scale", "any_bits"):
        value = torch.from_numpy(file[f"{name}.value"].view(np.int16)).view(torch.bfloat16).cuda()
        for copy, what in zip(quantize_both(value), ("rowwise", "columnwise"), strict=True):
            assert np.array_equal(copy.data.view(torch.uint8).cpu().numpy(), file[f"{name}.{what}"])
            assert np.array_equal(copy.scales.cpu().numpy(), file[f"{name}.{what}_scales"])


def trained(zero: int = 3, steps: int = 3, **options: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = Llama(LlamaConfig(vocab=512, dim=256, layers=2, heads=4, hidden=704))
    model = fxshard.compile(plain, zero=zero, optimizer=fxshard.AdamW(lr=1e-3), **options)  # type: ignore[arg-type]
    losses = []
    for step in range(steps):
        x = torch.randint(0, 512, (2, 120), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x, x)
        loss.backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.full_state_dict()


def test_resting_quantized_changes_nothing() -> None:
    off_losses, off = trained(precision=fxshard.MXFP8(gather="off"), lowering="eager")
    losses, on = trained(precision=fxshard.MXFP8(), lowering="eager")
    assert losses == off_losses
    assert all(torch.equal(on[name], off[name]) for name in off)


def test_trains_like_bf16_eager_and_compiled() -> None:
    reference, _ = trained(precision=fxshard.Precision(param=torch.bfloat16, reduce=torch.float32), lowering="eager")
    for lowering in ("eager", "inductor"):
        losses, _ = trained(precision=fxshard.MXFP8(), lowering=lowering)
        assert losses == pytest.approx(reference, rel=0.02)
