"""A model that compiles in no time, and its data, for tests in which four ranks share two cores."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.toy import Mlp


class Stack(nn.Module):
    """A few equal layers and a head of odd sizes: little to compile."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(layers))
        self.head = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(self.head(x), y)


def deep() -> Stack:
    """One more layer, where it matters what is gathered and reduced before what."""
    return Stack(layers=3)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What one rank gets; the global batch is that of all ranks."""
    generator = torch.Generator().manual_seed(8 * step + rank)
    return torch.randn(6, 7, generator=generator), torch.randn(6, 5, generator=generator)


def wide() -> Mlp:
    """As few nodes, and parameters so large that padding vanishes beside them."""
    torch.manual_seed(0)
    return Mlp(64, 256, 256, 64)


def wide_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8 * step + rank)
    return torch.randn(4, 64, generator=generator), torch.randn(4, 64, generator=generator)
