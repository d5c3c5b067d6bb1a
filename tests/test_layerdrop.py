"""LayerDrop at a rate of zero does not break the graph; above zero it does, and is said to."""

from __future__ import annotations

import pytest
import torch

import fxshard
from fxshard.frontend.layerdrop import NoneBelowZero
from tests.toy import Linears

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="the Dynamo of torch 2.11 does not take torch.rand through a mode"
)


class Stack(Linears):
    """As OPT, BART and Whisper write it in transformers."""

    def __init__(self, rate: float) -> None:
        super().__init__(width=4)
        self.layerdrop = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training:
                drawn = torch.rand([])
                if drawn < self.layerdrop:
                    continue
            x = layer(x).relu()
        return x.sum()


def test_a_rate_of_zero_is_one_graph() -> None:
    torch.manual_seed(0)
    plain = Stack(0.0)
    x = torch.randn(2, 4)
    wanted = plain(x)
    wanted.backward()
    gradients = [parameter.grad for parameter in plain.parameters()]
    torch.manual_seed(0)
    model = fxshard.compile(Stack(0.0), lowering="eager")
    loss = model(x)
    loss.backward()
    assert loss.item() == wanted.item() and model.report.compilations.captures == 1
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


def test_another_rate_breaks_the_graph_as_before() -> None:
    with pytest.raises(fxshard.CaptureError, match="Data-dependent branching"):
        fxshard.compile(Stack(0.5), lowering="eager")(torch.randn(2, 4))


@pytest.mark.parametrize("rate", [0.0, -1, 1.0])
def test_comparisons_have_the_value_they_had(rate: float) -> None:
    """Numbers that were drawn, numbers that were not, several at once: the mode knows only what is certain."""
    with NoneBelowZero():
        drawn, others = torch.rand([]), torch.tensor(-2.0)
        several = torch.rand(3)
        earlier = drawn < rate
        assert bool(earlier) == (rate == 1.0)
        assert bool(others < rate)
        assert isinstance(several < rate, torch.Tensor) and bool((several < rate).all()) == (rate == 1.0)
        drawn = torch.rand([])
        drawn -= 2
        assert bool(drawn < -1.0)
