"""Train the same small Llama with FSDP2 and with fxshard, in turns, and compare.

torchrun --standalone --nproc-per-node 2 examples/compare_fsdp2.py
torchrun --standalone --nproc-per-node 2 examples/compare_fsdp2.py --compile    # Inductor for both

Takes under a minute on two idle CPU cores; compiling takes longer. What to look at: the two columns of losses are
equal; both hold the same number of bytes at rest, up to padding. The ratio of step times is that of CPU processes that
share two cores: it says little about GPUs. Those are measured in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.bench.models import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=256, dim=128, layers=2, heads=4, hidden=384)
BATCH, LENGTH, LR = 4, 64, 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one model with FSDP2 and with fxshard.")
    parser.add_argument("--steps", type=int, default=20, help="training steps, at least 2 (default 20)")
    parser.add_argument("--compile", action="store_true", help="torch.compile for FSDP2, Inductor for fxshard")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    start = Llama(CONFIG).state_dict()
    contenders = {"FSDP2": by_fsdp2(start, options.compile), "fxshard": by_fxshard(start, options.compile)}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    if dist.get_rank() == 0:
        print(f"{'step':>4}  {'FSDP2':>10}  {'fxshard':>10}")
    for step in range(options.steps):
        for name, (model, optimizer) in contenders.items():
            began = time.perf_counter()
            losses[name].append(train(model, optimizer, step))
            seconds[name].append(time.perf_counter() - began)
        if dist.get_rank() == 0 and (step % 5 == 0 or step == options.steps - 1):
            print(f"{step:>4}  {losses['FSDP2'][-1]:>10.6f}  {losses['fxshard'][-1]:>10.6f}")
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    if dist.get_rank() == 0:
        print(f"losses are at most {apart:.1e} apart")
        for name, (model, optimizer) in contenders.items():
            print(f"{name:>8} holds {at_rest(model, optimizer) / 2**20:.2f} MiB between steps (parameters and state)")
        medians = {name: statistics.median(taken[len(taken) // 2 :]) for name, taken in seconds.items()}
        ratio = medians["fxshard"] / medians["FSDP2"]
        print(f"a step of fxshard takes {ratio:.2f} times as long as one of FSDP2 (medians, here)")
    dist.destroy_process_group()
    if apart > 1e-4:
        sys.exit("the losses should be equal up to rounding")


def by_fsdp2(
    start: dict[str, torch.Tensor], compiled: bool
) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    model = Llama(CONFIG)
    model.load_state_dict(start)
    for layer in model.layers:
        fully_shard(layer)
        if compiled:
            layer.compile()
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def by_fxshard(
    start: dict[str, torch.Tensor], compiled: bool
) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    plain = Llama(CONFIG)
    plain.load_state_dict(start)
    lowering = "inductor" if compiled else "eager"
    model = fxshard.compile(plain, zero=3, optimizer=fxshard.AdamW(lr=LR), lowering=lowering)
    return model, model.optimizer


def train(model: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on this rank's part of the batch; returns the loss of the whole batch."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(16, (BATCH, LENGTH + 1), generator=generator).cumsum(1) % 256  # small steps: learnable
    loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def at_rest(model: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's parameters and optimizer state, counted by their storages."""
    assert isinstance(model, nn.Module)
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:  # no step counters
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    main()
