"""How the Llamas of the presets are cut for tensor parallelism: torch's own styles, with sequence parallelism."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fxshard._torch.errors import ConfigError
from fxshard.bench.models import MLP, Attention, LanguageModel

PARTS = 2
"""Tensor-parallel ranks of contenders; they train on one batch."""


def is_dense(model: nn.Module) -> bool:
    """Whether a model is one that :func:`parallelize` knows."""
    return isinstance(model, LanguageModel) and all(
        isinstance(layer.attention, Attention) and isinstance(layer.mlp, MLP) for layer in model.layers
    )


def most_ranks(model: LanguageModel) -> int:
    """Over how many ranks it can be cut: each has whole heads."""
    return min(attention.kv_heads for attention in _attentions(model))


def _attentions(model: LanguageModel) -> list[Attention]:
    return [module for module in model.layers.modules() if isinstance(module, Attention)]


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Heads, hidden units and the vocabulary over ``mesh["tp"]``; what lies between is cut along the sequence."""
    assert isinstance(model, LanguageModel)
    ranks = mesh["tp"].size()
    for attention in _attentions(model):
        attention.heads //= ranks
        attention.kv_heads //= ranks

    def whole_sequence() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    styles = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": whole_sequence(),
        "layers.*.attention.q": ColwiseParallel(),
        "layers.*.attention.k": ColwiseParallel(),
        "layers.*.attention.v": ColwiseParallel(),
        "layers.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp_norm": SequenceParallel(),
        "layers.*.mlp": whole_sequence(),
        "layers.*.mlp.gate": ColwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh["tp"], styles)


def over_parts(model: nn.Module) -> tuple[nn.Module, DeviceMesh]:
    """The model cut over ``PARTS`` tensor-parallel ranks, and the mesh of all ranks, data × tensor parallel."""
    if not is_dense(model):
        raise ConfigError(f"no tensor-parallel plan for {type(model).__name__}: use --model toy or 1b")
    ranks = dist.get_world_size()
    if ranks % PARTS:
        raise ConfigError(f"{ranks} ranks are no multiple of {PARTS}: tensor parallelism here is over {PARTS} ranks")
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (ranks // PARTS, PARTS), mesh_dim_names=("dp", "tp"))
    return parallelize(model, mesh), mesh
