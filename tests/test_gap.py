"""A captured graph with one node in place of all that it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxshard.repetition.gap import everything


def captured(run: Callable[..., Any], *args: Any) -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append(graph)
        return graph.forward

    torch.compile(run, backend=keep, fullgraph=True)(*args)
    return found[0]


WEIGHT = nn.Parameter(torch.ones(3))


def loss(x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x * WEIGHT).tanh()
    return y.square().mean(), y.detach().argmax(-1)


def test_inputs_outputs_and_gradients_are_those_of_the_graph() -> None:
    gapped = everything(captured(loss, torch.ones(2, 3)))
    assert gapped is not None
    assert len([node for node in gapped.graph.nodes if node.op == "call_module"]) == 1
    x = torch.ones(2, 3)
    order = [node.meta["example_value"].shape for node in gapped.graph.find_nodes(op="placeholder")]
    first, second = gapped(*[x if shape == (2, 3) else WEIGHT for shape in order])
    assert first.shape == () and first.requires_grad and not second.requires_grad
    assert second.shape == (2,) and second.dtype == torch.int64
    (gradient,) = torch.autograd.grad(first, WEIGHT)
    assert gradient.shape == WEIGHT.shape


def view(x: Tensor) -> Tensor:
    return (x * 2).sum() + x.t().sum(), x.t()  # type: ignore[return-value]


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y.t()


def number(x: Tensor) -> tuple[Tensor, int]:
    return x * 2, x.shape[0]


def itself(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x * 2


@pytest.mark.parametrize(("run", "can"), [(view, False), (twice, False), (number, True), (itself, True)])
def test_what_shares_memory_is_not_left_out(run: Callable[..., Any], can: bool) -> None:
    """AOTAutograd would not learn of it; what is given and returned stands outside of the gap."""
    assert (everything(captured(run, torch.ones(2, 3, requires_grad=True))) is not None) == can
