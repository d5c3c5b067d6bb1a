"""Adapters with a scale on a GPU: products that scale themselves give the plain module's results, through Inductor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxshard

pytestmark = pytest.mark.gpu


class Adapted(nn.Module):
    """As peft has it, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(256, 512, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(256, 16, bias=False), nn.Linear(16, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)) * 2.0).float().square().mean()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_equals_the_plain_module(lowering: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    plain = Adapted().to(dtype).cuda()
    model = fxshard.compile(copy.deepcopy(plain), lowering=lowering)
    x = torch.randn(4, 64, 256, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    expected, loss = plain(x), model(x)
    expected.backward()
    loss.backward()
    targets = [node.target for graph in model.graphs.values() for node in graph.graph.nodes]
    assert targets.count(torch.ops.aten.addmm.default) == 2, "in forward and in backward"
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for (name, whole), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
        if whole.requires_grad:
            assert mine.grad is not None and whole.grad is not None
            difference = (mine.grad.view_as(whole) - whole.grad).float().norm()
            assert difference <= tolerance * whole.grad.float().norm(), name
