"""A tensor-parallel model to compile quickly: norms of sequence parallelism, matrices cut both ways, a plain scale."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.stack import wide

VOCAB, DIM, HIDDEN, LENGTH = 192, 64, 128, 8
"""Rows and vectors of every rank fill vectors of the CPU, so that AdamW rounds them alike on any mesh."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM, bias=False)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(DIM, bias=False)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.ones(VOCAB))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What one data-parallel rank gets; tensor-parallel ranks get the same."""
    generator = torch.Generator().manual_seed(8 * step + rank)
    x, y = torch.randint(VOCAB, (2, 2, LENGTH), generator=generator)
    return x, y


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def parallel(mesh: DeviceMesh, model: nn.Module | None = None) -> nn.Module:
    """The model with its parameters on the tensor-parallel dimension of a mesh, but for the plain ``scale``."""
    styles = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(Model() if model is None else model, mesh["tp"], styles)


def parallel_wide(mesh: DeviceMesh, model: nn.Module | None = None) -> nn.Module:
    """Of ``wide()``. With ``units=["net"]``, or also ``net.2``, rows over two data-parallel ranks have a matrix that
    lies on both, and two that do not."""
    styles = {
        "net.0": ColwiseParallel(),
        "net.2": RowwiseParallel(),
        "net.4": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(wide() if model is None else model, mesh["tp"], styles)


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """``parallel`` as ``fxshard.plan`` takes it."""
    return parallel(mesh, model)


def cut_wide(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallel_wide(mesh, model)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Model()


def fsdp2(mesh: DeviceMesh) -> nn.Module:
    """The model under FSDP2 with tensor parallelism."""
    model = parallel(mesh)
    for layer in model.get_submodule("layers"):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    """What torch itself takes a tensor for."""
    return value.full_tensor() if isinstance(value, DTensor) else value
