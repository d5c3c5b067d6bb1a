"""A model in stages, its data, and training runs of it: pipelined, and whole in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from fxshard._torch import private

VOCAB, DIM, LENGTH = 16, 8, 6
MICRO = 4
"""Micro-batches in a step."""
STEPS = 3
Stage = Callable[..., PipelineStage]
Make = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]


class Part(nn.Module):
    """Some layers of a model, the embedding if it is the first, the head if it is the last."""

    def __init__(self, layers: int, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM) if first else nn.Identity()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB, bias=False) if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def parts(stages: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Part(2 + i % 2, i == 0, i == stages - 1) for i in range(stages)]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a data-parallel rank trains on in a step: two sequences for each micro-batch."""
    generator = torch.Generator().manual_seed(8 * step + rank)
    x, y = torch.randint(VOCAB, (2, 2 * MICRO, LENGTH), generator=generator)
    return x, y


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradients(model: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    model = getattr(model, "_orig_mod", model)
    return {f"{prefix}.{name}": whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def counted(calls: Counter[str]) -> Iterator[None]:
    """How often fxshard gathers and reduces."""

    def counting(name: str) -> Any:
        call = getattr(private, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return call(*args, **kwargs)

        return mock.patch.object(private, name, count)

    with counting("all_gather"), counting("reduce_scatter"):
        yield


def pipelined(mesh: DeviceMesh, make: Make, stage: Stage, schedule: Any, per_rank: int = 1) -> dict[str, Any]:
    """Losses and gradients of the stages that this rank has; ``mesh`` has the dimensions dp and pp."""
    rank, ranks, replica = mesh.get_local_rank("pp"), mesh["pp"].size(), mesh.get_local_rank("dp")
    count, numbers = ranks * per_rank, [rank + i * ranks for i in range(per_rank)]
    made = [make(parts(count)[number]) for number in numbers]
    group, device = mesh.get_group("pp"), torch.device("cpu")
    stages = [
        stage(model, number, count, device, group=group) for number, (model, _) in zip(numbers, made, strict=True)
    ]
    step_of = schedule(stages[0] if per_rank == 1 else stages, MICRO, loss_fn=loss_of)
    calls: Counter[str] = Counter()
    found: dict[str, Any] = {"losses": [], "grads": [], "calls": calls}
    for step in range(STEPS):
        x, y = data(step, replica)
        losses: list[torch.Tensor] = []
        with counted(calls):
            step_of.step(*([x] if rank == 0 else []), target=y if rank == ranks - 1 else None, losses=losses)
        found["losses"].append([float(loss.detach()) for loss in losses])
        grads: dict[str, torch.Tensor] = {}
        for number, (model, optimizer) in zip(numbers, made, strict=True):
            grads |= gradients(model, str(number))
            with counted(calls):
                optimizer.step()
            optimizer.zero_grad()
        found["grads"].append(grads)
    return found


def in_one_process(replicas: int, optimizer: Callable[[Any], torch.optim.Optimizer], stages: int = 2) -> dict[str, Any]:
    """The same of all stages, by plain PyTorch: micro-batches one after the other, of all replicas."""
    model = nn.Sequential(*parts(stages))
    update = optimizer(model.parameters())
    found: dict[str, Any] = {"losses": [[] for _ in range(replicas)], "grads": []}
    for step in range(STEPS):
        for replica in range(replicas):
            losses = []
            for x, y in zip(*(tensor.chunk(MICRO) for tensor in data(step, replica)), strict=True):
                loss = loss_of(model(x), y)
                (loss / replicas).backward()
                losses.append(float(loss.detach()))
            found["losses"][replica].append(losses)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(MICRO)
        found["grads"].append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        update.step()
        update.zero_grad()
    return found
