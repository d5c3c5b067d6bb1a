"""What forward saves for backward: inputs of norms and activations, but no copies that products read."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxshard
from tests.thorough import thorough
from tests.training import step_both


class RMSNorm(nn.Module):
    """As ``transformers`` writes it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(32)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("lowering", ["eager", thorough("inductor")])
def test_copies_that_products_read_are_made_again(lowering: str) -> None:
    """Of each block: its input, one scale a row, what GELU is given; and what the loss squares. Not the norm's output,
    nor GELU's. Losses and weights after three steps are plain torch's.
    """
    torch.manual_seed(0)
    plain, twin = Net(), Net()
    twin.load_state_dict(plain.state_dict())
    model = fxshard.compile(twin, optimizer=fxshard.AdamW(lr=0.01), lowering=lowering)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    x = torch.randn(8, 32)
    for _ in range(3):
        exact = {"rtol": 0, "atol": 0} if lowering == "eager" else {}
        torch.testing.assert_close(*step_both(model, plain, optimizer, x), **exact)
    outputs = model.graphs["forward"].graph.output_node().all_input_nodes
    saved = [node.meta["val"].numel() for node in outputs if node.op != "placeholder"]
    assert sorted(numel for numel in saved if numel > 1) == sorted([*[8, 8 * 64] * 3, *[8 * 32] * 3])


class Trailing(nn.Module):
    """Reads a buffer, and then changes it: backward needs the value that was read."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x)) - 0.1 * self.average
        self.average.lerp_(x.detach().mean(0), 0.1)
        return x.square().mean()


def test_a_buffer_that_forward_changes_is_saved_as_it_was_read() -> None:
    torch.manual_seed(0)
    plain, twin = Trailing(), Trailing()
    twin.load_state_dict(plain.state_dict())
    model = fxshard.compile(twin, lowering="eager")
    for _ in range(2):
        x = torch.randn(4, 8)
        plain(x).backward()
        model(x).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    torch.testing.assert_close(model.full_state_dict()["average"], plain.average)
