"""Contenders of a benchmark: each shards and compiles a plain model, and gives it an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.bench.tensor_parallel import parallelize

Precision = fxshard.Precision | None
Made = tuple[nn.Module, torch.optim.Optimizer]
Make = Callable[[nn.Module, Precision], Made]

BF16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)
ADAMW = fxshard.AdamW(lr=1e-4)
MUON = fxshard.Muon(lr=1e-3, adamw=ADAMW)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of every stack: modules of one class in a list that is not within another, as that of experts is."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [module for name, module in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return [layer for stack in outer if len(stack) > 1 and len(set(map(type, stack))) == 1 for layer in stack]


def fsdp2(model: nn.Module, precision: Precision, compiled: bool, mesh: DeviceMesh | None = None) -> Made:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = (
        MixedPrecisionPolicy(precision.param, precision.reduce) if precision is not None else MixedPrecisionPolicy()
    )
    for layer in blocks(model):
        if compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy, mesh=mesh)
    fully_shard(model, mp_policy=policy, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def fsdp2_tensor_parallel(model: nn.Module, precision: Precision, compiled: bool = True) -> Made:
    parallel, mesh = parallelize(model)
    return fsdp2(parallel, precision, compiled, mesh["dp"])


def torchao(model: nn.Module, precision: Precision) -> Made:
    """torchao's float8 with a scale per tensor over FSDP2 + compile; weights are gathered in float8.

    Needs torchao on the path; its Python files are enough.
    """
    from torchao.float8 import (  # type: ignore[import-not-found]
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: not name.endswith("head"))
    sharded, optimizer = fsdp2(model, precision, compiled=True)
    optimizer.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(sharded))
    return sharded, optimizer


def ours(
    model: nn.Module, precision: Precision, zero: int, optimizer: fxshard.AdamW | fxshard.Muon = ADAMW, **options: Any
) -> Made:
    sharded = fxshard.compile(model, zero=zero, precision=precision, optimizer=optimizer, **options)
    return sharded, sharded.optimizer


def ours_tensor_parallel(model: nn.Module, precision: Precision, zero: int = 3, **options: Any) -> Made:
    parallel, mesh = parallelize(model)
    return ours(parallel, precision, zero, mesh=mesh["dp"], **options)


def ddp(model: nn.Module, precision: Precision) -> Made:
    """DistributedDataParallel around the compiled model; in mixed precision autocast over fp32 parameters."""
    from torch.nn.parallel import DistributedDataParallel

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.compile()
    parallel = DistributedDataParallel(model)
    if precision is not None and precision.param is not None:
        autocast = torch.autocast(next(model.parameters()).device.type, precision.param)
        parallel.forward = autocast(parallel.forward)  # type: ignore[method-assign]
    return parallel, optimizer


def unsharded(model: nn.Module, precision: Precision) -> Made:
    """The whole model under ``torch.compile`` in the compute dtype, nothing sharded, no masters: a lower bound."""
    if precision is not None and precision.param is not None:
        model = model.to(precision.param)
    return torch.compile(model), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # type: ignore[return-value]


CONTENDERS: dict[str, Make] = {
    "fxshard": lambda model, precision: ours(model, precision, 3),
    "fxshard-no-logits": lambda model, precision: ours(model, precision, 3, return_logits=False),
    "fxshard-graphs": lambda model, precision: ours(model, precision, 3, cuda_graphs=True),
    "fxshard-unfused": lambda model, precision: ours(model, precision, 3, experts="off"),
    "fxshard-masked": lambda model, precision: ours(model, precision, 3, debug=fxshard.Debug(window_attention=False)),
    "fxshard-dynamic": lambda model, precision: ours(model, precision, 3, dynamic=True),
    "fxshard-muon": lambda model, precision: ours(model, precision, 3, MUON),
    "fxshard-bf16-state": lambda model, precision: ours(model, precision, 3, replace(ADAMW, state="bf16")),
    "fxshard-8bit": lambda model, precision: ours(model, precision, 3, replace(ADAMW, state="8bit")),
    "fxshard-host": lambda model, precision: ours(model, precision, 3, replace(ADAMW, offload="host")),
    "fxshard-8bit-host": lambda model, precision: ours(
        model, precision, 3, replace(ADAMW, state="8bit", offload="host")
    ),
    "fxshard-zero2": lambda model, precision: ours(model, precision, 2),
    "fxshard-zero1": lambda model, precision: ours(model, precision, 1),
    "fxshard-float8": lambda model, _: ours(model, fxshard.Float8(), 3),
    "fxshard-float8-zero2": lambda model, _: ours(model, fxshard.Float8(), 2),
    "fxshard-float8-graphs": lambda model, _: ours(model, fxshard.Float8(), 3, cuda_graphs=True),
    "fxshard-float8-row": lambda model, _: ours(model, fxshard.Float8(scaling="row", weight_gradient="bf16"), 3),
    "fxshard-float8-experts": lambda model, _: ours(model, fxshard.Float8(experts=("*",)), 3),
    "fxshard-tp": ours_tensor_parallel,
    "fsdp2": lambda model, precision: fsdp2(model, precision, compiled=False),
    "fsdp2-compile": lambda model, precision: fsdp2(model, precision, compiled=True),
    "fsdp2-tp-compile": fsdp2_tensor_parallel,
    "torchao": torchao,
    "ddp": ddp,
    "compile": unsharded,
}

TENSOR_PARALLEL = ("fxshard-tp", "fsdp2-tp-compile")
"""Contenders in which two neighbouring ranks share a batch."""
