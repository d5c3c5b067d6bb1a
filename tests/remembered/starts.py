"""Starts of a program in one process: each compiles a model anew, with a cache that may know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import fxshard
from fxshard import _compat, backend
from fxshard.helpers import beside
from fxshard.lowering import interpreted
from fxshard.remembered.recall import recall as backend_recall
from tests.pool import forget


class Deep(nn.Module):
    """Layers that repeat, dropout among them."""

    def __init__(self, layers: int = 6, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x).tanh(), self.dropout)
        return self.norm(x).square().mean()


def uncompiled(segment: fx.GraphModule, inputs: Any) -> Any:
    """In place of Inductor: what a segment says, without compiling it."""
    return interpreted(segment)


@dataclass(frozen=True)
class Start:
    """What a start did and what came of it."""

    traced: bool
    """Whether anything but Dynamo traced the model."""
    left: list[Tensor]
    """Results, gradients and parameters of two steps."""
    schedules: str
    graphs: dict[str, str]
    left_out: int


def start(make: Any = Deep, steps: int = 2, shape: tuple[int, ...] = (4, 8), **options: Any) -> Start:
    """Compile a model as a program does that has just started, and train it."""
    forget()
    options = {"optimizer": fxshard.AdamW(lr=1e-2), "lowering": "inductor", **options}
    model = fxshard.compile(make(), **options)
    left: list[Tensor] = []
    recalled: list[Any] = []

    def recall(key: str) -> Any:
        recalled.append(backend_recall(key))
        return recalled[-1]

    with (
        mock.patch.object(backend, "recall", recall),
        mock.patch.object(backend, "abridge", wraps=backend.abridge) as abridge,
        mock.patch.object(_compat, "inductor_compile", uncompiled),
    ):
        for step in range(steps):
            loss = model(torch.randn(*shape, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            left += [loss.detach().clone(), *(parameter.grad.clone() for parameter in _trained(model))]
            model.optimizer.step()
            model.optimizer.zero_grad()
    beside.finish_all()
    left += tree_leaves(model.full_state_dict())
    left = [value.to_local() if hasattr(value, "to_local") else value for value in left]
    texts = {phase: str(graph.graph) for phase, graph in model.graphs.items()}
    traced = abridge.called or [found is not None for found in recalled] != [True]
    schedules = "\n".join(f"{kind}\n{schedule}" for kind, schedule in model.schedules.items())
    return Start(traced, left, schedules, texts, model.compilations.layers_left_out)


def _trained(model: fxshard.ShardedModule) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def same(one: Start, other: Start) -> bool:
    """Whether two starts came to the same, to the bit."""
    bits = all(torch.equal(a, b) for a, b in zip(one.left, other.left, strict=True))
    return bits and (one.schedules, one.graphs, one.left_out) == (other.schedules, other.graphs, other.left_out)
