"""Costs of attention kernels, against torch's own formulas where those apply."""

import pytest
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxshard.planner.cost import node_flops

aten = torch.ops.aten
KINDS = ["flash_attention", "efficient_attention", "cudnn_attention"]


def node_of(target: object, *values: torch.Tensor) -> fx.Node:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(values))]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    node = graph.call_function(target, tuple(inputs))  # type: ignore[arg-type]
    node.meta["val"] = values[0]
    return node


def heads(count: int) -> torch.Tensor:
    return torch.empty(2, count, 16, 8, device="meta")


@pytest.mark.parametrize("kind", KINDS)
def test_attention_costs_what_torch_says(kind: str) -> None:
    forward = getattr(aten, f"_scaled_dot_product_{kind}")
    backward = getattr(aten, f"_scaled_dot_product_{kind}_backward")
    q, k, v = heads(4), heads(4), heads(4)
    assert node_flops(node_of(forward.default, q, k, v)) == flop_registry[forward](q, k, v, out_val=q)
    assert node_flops(node_of(backward.default, q, q, k, v)) == flop_registry[backward](q, q, k, v, out_val=(q, k, v))


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_heads_cost_as_much_as_all_heads(kind: str) -> None:
    """torch 2.11's formula raises for keys with fewer heads than queries, which every Llama 3 has."""
    forward = getattr(aten, f"_scaled_dot_product_{kind}").default
    few, all_heads = (node_flops(node_of(forward, heads(8), heads(n), heads(n))) for n in (2, 8))
    assert few == all_heads > 0
