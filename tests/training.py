"""Training runs that tests compare: fxshard on this rank, FSDP2 on this rank, plain PyTorch on the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fxshard
from tests import stack
from tests.stack import Stack
from tests.toy import Llama, batch

VOCAB = 96
EPS = 1e-4
"""AdamW divides by |gradient| + eps: with a tiny eps, noise in a vanishing gradient moves a parameter by lr."""
Make = Callable[[], nn.Module]


@dataclass
class Run:
    """What a run left behind: losses (mean over ranks), gradients of the last step, final parameters."""

    losses: list[float]
    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]

    def same(self, other: Run) -> bool:
        """Bitwise equality of everything."""
        return (
            self.losses == other.losses
            and all(torch.equal(self.params[name], other.params[name]) for name in other.params)
            and all(torch.equal(self.grads[name], other.grads[name]) for name in other.grads)
        )

    def distance(self, other: Run) -> float:
        """The largest relative difference of a loss, a gradient or a parameter."""
        losses = [abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True)]
        tensors = [
            float((mine[name].double() - theirs[name].double()).norm() / theirs[name].double().norm().clamp_min(1e-12))
            for mine, theirs in ((self.grads, other.grads), (self.params, other.params))
            for name in theirs
        ]
        return max(losses + tensors)


def llama(tied: bool = False, layers: int = 3) -> nn.Module:
    """A transformer. Compiling it takes a second per layer; where none is needed, ``Stack`` takes half of one."""
    torch.manual_seed(0)
    return Llama(vocab=VOCAB, dim=32, layers=layers, heads=4, hidden=88, tied=tied)


def mean_over_ranks(loss: torch.Tensor) -> float:
    value = loss.detach().clone().double()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)


def data_for(model: nn.Module, step: int, ranks: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What one of the ranks trains a model of these tests on."""
    return stack.batch(step, rank) if isinstance(model, Stack) else batch(step, ranks, rank, VOCAB)


def my_data_for(model: nn.Module, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    plain = model._inner if isinstance(model, fxshard.ShardedModule) else model
    return data_for(plain, step, dist.get_world_size(), dist.get_rank())


def all_data_for(model: nn.Module, step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch: that of all ranks."""
    parts = [data_for(model, step, ranks, rank) for rank in range(ranks)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def this_ranks_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(step, dist.get_world_size(), dist.get_rank(), VOCAB)


def full_gradients(model: fxshard.ShardedModule) -> dict[str, torch.Tensor]:
    """Gradients of a sharded model as whole tensors, put together from what each rank's DTensors say of themselves."""
    full = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        local = parameter.grad.to_local() if dist.is_initialized() else parameter.grad
        if not dist.is_initialized() or parameter.grad.placements[-1].is_replicate():
            full[name] = local.clone()
            continue
        mesh = parameter.grad.device_mesh  # of two dimensions the last shards
        parts: list[Any] = [None] * mesh.size(mesh.ndim - 1)
        dist.all_gather_object(parts, local.clone(), group=mesh.get_group(mesh.ndim - 1))
        full[name] = torch.cat(parts)
    return full


def deliver(model: fxshard.ShardedModule, grads: dict[str, torch.Tensor]) -> None:
    """Give each rank its rows of whole gradients, as reductions do: for tests in which no graph is needed."""
    for bucket in model._sharding.buckets:
        if not bucket.plan.trainable:
            continue
        flat = bucket.hold_gradient().zero_()
        for fragment, parameter, own in zip(bucket.fragments, bucket.params, bucket.grads, strict=True):
            if fragment.name in grads:
                rows = bucket.rows(fragment.name, bucket.part(fragment.name, grads[fragment.name]))
                bucket.as_rows(flat, fragment.name).copy_(rows)
                parameter.grad = own


def random_gradients(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Whole gradients for a plain model's parameters, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters() if p.requires_grad}


def stepped(model: fxshard.ShardedModule, make: Make, seeds: range) -> dict[str, torch.Tensor]:
    """Steps on random gradients; returns the whole parameters."""
    for seed in seeds:
        deliver(model, random_gradients(make(), seed))
        model.optimizer.step()
        model.optimizer.zero_grad()
    return model.full_state_dict()


def step_beside(
    model: fxshard.ShardedModule,
    plain: nn.Module,
    reference: torch.optim.Optimizer,
    grads: dict[str, torch.Tensor],
    what: object,
) -> list[str]:
    """Step sharded, where the gradients are already, and plain with the same; returns what differs in any bit."""
    for name, parameter in plain.named_parameters():
        parameter.grad = grads[name].clone() if name in grads else None
    model.optimizer.step()
    model.optimizer.zero_grad()
    reference.step()
    found = model.full_state_dict()
    return [f"step {what}: {name}" for name, p in plain.state_dict().items() if not torch.equal(p, found[name])]


def train_step(model: Any, *inputs: Any, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    """One step of an ordinary loop, by default with the optimizer that the model has; returns the loss."""
    optimizer = optimizer or model.optimizer
    loss = model(*inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def step_both(
    model: fxshard.ShardedModule, plain: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of a sharded model and of a plain one on the same batch; their losses."""
    results = [each(*args, **kwargs) for each in (model, plain)]
    mine, theirs = (getattr(result, "loss", result) for result in results)
    for loss, each in ((mine, model.optimizer), (theirs, optimizer)):
        loss.backward()
        each.step()
        each.zero_grad()
    return mine.detach(), theirs.detach()


def with_debug(options: dict[str, Any]) -> dict[str, Any]:
    """Options of ``fxshard.compile`` or ``plan`` in which switches of ``fxshard.Debug`` may stand by themselves."""
    names = [field.name for field in fields(fxshard.Debug)]
    switches = {name: value for name, value in options.items() if name in names}
    others = {name: value for name, value in options.items() if name not in names}
    return {**others, "debug": fxshard.Debug(**switches)} if switches else others


def sharded_run(make: Make = llama, *, steps: int = 5, lr: float = 1e-3, **options: Any) -> Run:
    """Train with fxshard on this rank's part of the batches."""
    options.setdefault("lowering", "eager")
    model = fxshard.compile(make(), optimizer=fxshard.AdamW(lr=lr, eps=EPS), **with_debug(options))
    return train(model, model.optimizer, steps)


def train(model: fxshard.ShardedModule, optimizer: torch.optim.Optimizer, steps: int) -> Run:
    losses, grads = [], {}
    for step in range(steps):
        loss = model(*my_data_for(model, step))
        loss.backward()
        losses.append(mean_over_ranks(loss))
        if step == steps - 1:
            grads = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, grads, model.full_state_dict())


def plain_run(
    ranks: int, make: Make = llama, *, steps: int = 5, lr: float = 1e-3, fused: bool = True, apart: bool = False
) -> Run:
    """Train the plain module in one process on the global batch; ``apart``: on the mean of the ranks' losses."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS, fused=fused)
    losses, grads = [], {}
    for step in range(steps):
        parts = [data_for(model, step, ranks, rank) for rank in range(ranks)] if apart else []
        loss = torch.stack([model(*x) for x in parts or [all_data_for(model, step, ranks)]]).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, grads, {name: value.clone() for name, value in model.state_dict().items()})


def fsdp2_run(make: Make = llama, *, steps: int = 5, lr: float = 1e-3, mesh: Any = None) -> Run:
    """Train with FSDP2 on this rank's part of the batches."""
    from torch.distributed.fsdp import fully_shard

    model = make()
    data = [my_data_for(model, step) for step in range(steps)]
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS, fused=True)
    losses, grads = [], {}
    for step in range(steps):
        loss = model(*data[step])
        loss.backward()
        losses.append(mean_over_ranks(loss))
        grads = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, grads, {name: value.full_tensor() for name, value in model.state_dict().items()})
