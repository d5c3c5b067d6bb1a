"""Small models and data for tests."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention without biases."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        q, k, v = (proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class SwiGlu(nn.Module):
    """`w2(silu(w1 x) * w3 x)`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.RMSNorm(dim, eps=1e-5)
        self.mlp = SwiGlu(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """A language model with the parameters of Llama, and no positions: the causal mask is order enough for a toy."""

    def __init__(
        self, vocab: int = 96, dim: int = 32, layers: int = 3, heads: int = 4, hidden: int = 88, tied: bool = False
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab, bias=False)
        # As small as a head's weights, so that a tied model starts with sensible logits too.
        nn.init.normal_(self.emb.weight, std=dim**-0.5)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the logits for tokens `x`, or the mean cross-entropy against targets `y`."""
        hidden = self.emb(x)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Mlp(nn.Module):
    """Linear layers with biases and tanh between them, of sizes that divide by nothing."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        sizes = sizes or (7, 13, 5)
        steps: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            steps += [nn.Linear(fan_in, fan_out), nn.Tanh()]
        self.net = nn.Sequential(*steps[:-1])

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the outputs for `x`, or their mean squared error against `y`."""
        out = self.net(x)
        return out if y is None else F.mse_loss(out, y)


class Linears(nn.Module):
    """Equal linear layers, for whatever a test's ``forward`` does with them."""

    def __init__(self, layers: int = 3, width: int = 8, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class OneLinear(nn.Module):
    """A linear layer, for whatever a test's ``forward`` does with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)


class Untraceable(OneLinear):
    """A model that no single graph computes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def batch(step: int, ranks: int, rank: int, vocab: int, size: int = 4, length: int = 16) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens for one rank, each (size, length).

    Concatenated over `ranks` they are the global batch of `step`, which is also what one rank with `ranks * size` gets.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocab, (ranks * size, length + 1), generator=generator)
    mine = tokens[rank * size : (rank + 1) * size]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
