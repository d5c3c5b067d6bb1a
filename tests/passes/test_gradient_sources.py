"""Which results of forward a gradient is computed from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import fxshard
from fxshard.passes.gradient_sources import gradient_sources
from fxshard.schedule.events import Kind, events

aten = torch.ops.aten


def backward(*outputs: Any) -> tuple[fx.Graph, list[fx.Node]]:
    """Gradients of tangents t and u: of t alone, of u through a product with t, of both, of neither."""
    descriptors = pytest.importorskip("torch._functorch._aot_autograd.descriptors")
    graph = fx.Graph()
    saved, t, u = (graph.placeholder(name) for name in ("saved", "tangents_1", "tangents_2"))
    for node, output in zip((t, u), outputs, strict=True):
        node.meta["desc"] = descriptors.TangentAOTInput(output)
    first = graph.call_function(aten.mul.Tensor, (t, saved))
    second = graph.call_function(aten.sin.default, (u,))
    third = graph.call_function(aten.add.Tensor, (first, second))
    constant = graph.call_function(aten.cos.default, (saved,))
    gradients = [first, second, third, constant]
    graph.output(tuple(gradients))
    return graph, gradients


def test_only_gradients_of_some_results_are_listed() -> None:
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput

    graph, gradients = backward(PlainAOTOutput(0), PlainAOTOutput(3))
    assert gradient_sources(graph, gradients) == {gradients[0]: (0,), gradients[1]: (3,)}


def test_what_is_no_plain_result_always_counts() -> None:
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput, PlainAOTOutput

    graph, gradients = backward(PlainAOTOutput(0), InputMutationAOTOutput(PlainAOTInput(0)))
    assert gradient_sources(graph, gradients) == {gradients[0]: (0,)}


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(x)
        return self.one(x).sum(), self.two(x).sum()


def test_the_event_that_takes_a_bucket_knows_them() -> None:
    model = fxshard.compile(TwoResults(), lowering="eager")
    model(torch.ones(2, 4))
    (grad,) = [node for node, event in events(model.graphs["backward"].graph) if event.kind is Kind.GRAD]
    assert grad.kwargs == {"needs": ((2, (0,)), (3, (0,)), (4, (1,)), (5, (1,)))}
