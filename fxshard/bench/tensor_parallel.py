"""The benchmarks' Llama with its layers cut over tensor-parallel ranks, as torchtitan cuts them."""

from __future__ import annotations

from typing import Any

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
"""Tensor-parallel ranks; they train on one batch."""


def two_dimensions(device: str) -> DeviceMesh:
    """All ranks: data-parallel × tensor-parallel."""
    ranks = dist.get_world_size()
    if ranks % PARTS:
        raise ConfigError(f"{ranks} ranks are no multiple of {PARTS}: tensor parallelism here is over {PARTS} ranks")
    return init_device_mesh(device, (ranks // PARTS, PARTS), mesh_dim_names=("dp", "tp"))


def parallelize(model: nn.Module) -> tuple[nn.Module, DeviceMesh]:
    """The model under tensor and sequence parallelism, and the mesh."""
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"no tensor-parallel plan for {type(model).__name__}: use --model toy or 1b")
    mesh = two_dimensions(model.head.weight.device.type)
    return cut(model, mesh), mesh


def is_dense(model: nn.Module) -> bool:
    """Whether a model is one that :func:`cut` knows."""
    return isinstance(model, LanguageModel) and all(
        isinstance(layer.attention, Attention) and isinstance(layer.mlp, MLP) for layer in model.layers
    )


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Heads, hidden units and the vocabulary over ``mesh["tp"]``; what lies between is cut along the sequence."""
    ranks = mesh["tp"].size()
    for module in model.modules():
        if isinstance(module, Attention):  # each rank has some of the heads
            if module.kv_heads % ranks:
                raise ConfigError(f"{module.kv_heads} heads of keys cannot be cut over {ranks} tensor-parallel ranks")
            module.heads, module.kv_heads = module.heads // ranks, module.kv_heads // ranks
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    styles: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": gathered,
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in "qkv"},
        "layers.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp_norm": SequenceParallel(),
        "layers.*.mlp": gathered,
        "layers.*.mlp.gate": ColwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh["tp"], styles)
