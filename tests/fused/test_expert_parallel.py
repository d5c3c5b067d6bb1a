"""Fused experts between the all-to-alls of an expert-parallel model: weight gradients run while tokens travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from tests.fused.models import product
from tests.pool import Pool
from tests.training import full_gradients

DIM, INNER, EXPERTS, TOKENS = 8, 12, 4, 12


class Layer(nn.Module):
    """Experts of which this rank holds ``EXPERTS / ranks``; token ``i`` goes to expert ``i % EXPERTS``."""

    def __init__(self, group: str = "", rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(DIM, DIM)
        gate_up, down = torch.randn(EXPERTS, 2 * INNER, DIM) / DIM**0.5, torch.randn(EXPERTS, DIM, INNER) / INNER**0.5
        self.gate_up, self.down = (nn.Parameter(weight.chunk(ranks)[rank].clone()) for weight in (gate_up, down))
        self.group, self.ranks = group, ranks

    def exchange(self, x: Tensor) -> Tensor:
        splits = [x.shape[0] // self.ranks] * self.ranks
        return functional.all_to_all_single_autograd(x, splits, splits, self.group) if self.ranks > 1 else x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.dense(x))
        tokens = h.view(-1, EXPERTS, DIM).transpose(0, 1).contiguous()  # by expert, hence by owner
        there = self.exchange(tokens).view(self.ranks, -1, tokens.shape[1], DIM).transpose(0, 1)
        rows = there.shape[1] * there.shape[2]
        offsets = torch.arange(1, there.shape[0] + 1, dtype=torch.int32) * rows
        gate, up = product(there.reshape(-1, DIM), self.gate_up.mT, offsets).chunk(2, -1)
        done = product(F.silu(gate) * up, self.down.mT, offsets)
        back = self.exchange(done.view(there.shape).transpose(0, 1).flatten(0, 1).contiguous())
        return F.mse_loss(h + back.view(tokens.shape).transpose(0, 1).reshape(x.shape), y)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * TOKENS, DIM, generator=generator), torch.randn(2 * TOKENS, DIM, generator=generator)


def while_tokens_travel(graph: fx.Graph) -> int:
    """Weight gradients of experts that stand between the start of a collective and its wait."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    waits = [node for node in graph.nodes if "wait_tensor" in str(node.target)]
    spans = [(order[wait.args[0]], order[wait]) for wait in waits]
    products = [order[node] for node in graph.nodes if str(node.target).startswith("fxshard.grouped_wgrad")]
    return sum(any(start < product < end for start, end in spans) for product in products)


def on_and_off() -> dict[bool, tuple[dict[str, Tensor], int]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep_dp", "ep"))
    where: Any = (mesh.get_group("ep").group_name, dist.get_rank(), 2)
    found = {}
    for overlap in (True, False):
        groups = {"gate_up": mesh["ep_dp"], "down": mesh["ep_dp"]}
        model = fxshard.compile(Layer(*where), groups=groups, lowering="eager", debug=fxshard.Debug(overlap=overlap))
        model(*(value.chunk(2)[dist.get_rank()] for value in batch())).backward()
        found[overlap] = full_gradients(model), while_tokens_travel(model.graphs["backward"].graph)
    return found


@pytest.mark.shows("G9")
def test_weight_gradients_run_while_tokens_travel(ranks: Pool) -> None:
    plain = Layer()
    plain(*batch()).backward()
    for rank, found in enumerate(ranks(2, on_and_off)):
        (mine, moved), (others, unmoved) = found[True], found[False]
        assert (moved, unmoved) == (2, 0)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            wanted = parameter.grad if name.startswith("dense") else parameter.grad.chunk(2)[rank]
            assert torch.equal(mine[name], others[name]), name
            assert (mine[name] - wanted).norm() < 2e-6 * wanted.norm(), name
