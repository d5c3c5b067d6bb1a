"""Python numbers that Dynamo leaves open, in code that several layers share."""

from __future__ import annotations

import torch
from torch import nn

import fxshard


class Scaled(nn.Module):
    """A layer with a number of its own, which Dynamo leaves open from the second layer on."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(x) * self.scale
        torch._dynamo.graph_break()
        return torch.tanh(x)


def test_a_graph_that_is_called_with_other_numbers() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Scaled(0.1 * (i + 1)) for i in range(4)))

    plain, model = make(), fxshard.compile(make(), fullgraph=False, lowering="eager")
    for step in range(2):
        for each in (*plain.modules(), *model.modules()):
            if isinstance(each, Scaled):
                each.scale += step  # and it changes
        x = torch.randn(3, 4)
        found, expected = model(x).square().sum(), plain(x).square().sum()
        found.backward()
        expected.backward()
        torch.testing.assert_close(found, expected)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class Attends(nn.Module):
    """Attention by a causal mask, with a rate of dropout that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        x = self.linear(x)
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        return nn.functional.scaled_dot_product_attention(x, x, x, mask, rate).square().mean()


def test_a_rate_of_dropout_that_changes() -> None:
    plain, compiled = Attends(), Attends()
    compiled.load_state_dict(plain.state_dict())
    model = fxshard.compile(compiled, lowering="eager")
    x = torch.randn(2, 2, 4, 8)
    for rate in (0.1, 0.3, 0.6):
        found = []
        for each in (plain, model):
            torch.manual_seed(1)
            found.append(each(x, rate))
        torch.testing.assert_close(*found)
