"""Frozen weights in int8 and NF4 on a GPU: the codes of the CPU, and through Inductor the plain module's results."""

from __future__ import annotations

import pytest
import torch

import fxshard
from fxshard.kernels.blockwise import quantize
from tests.precision.test_frozen_linears import batch, net

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_codes_are_those_of_the_cpu(format: str) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    here, there = quantize(weight, format), quantize(weight.cuda(), format)
    assert all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_gradients_through_inductor(format: str) -> None:
    plain = fxshard.quantize_frozen(net().cuda(), format)
    model = fxshard.compile(fxshard.quantize_frozen(net().cuda(), format))
    inputs = [value.cuda() for value in batch(0)]
    expected, loss = plain(*inputs), model(*inputs)
    expected.backward()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, whole), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
        if whole.requires_grad:
            torch.testing.assert_close(mine.grad.view_as(whole), whole.grad, rtol=1e-4, atol=1e-6, msg=name)
