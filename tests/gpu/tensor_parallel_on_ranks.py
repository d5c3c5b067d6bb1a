"""Tensor-parallel models on CUDA: losses and parameters like those of FSDP2 with tensor parallelism. Run by torchrun:

torchrun --standalone --nproc-per-node 4 tests/gpu/tensor_parallel_on_ranks.py
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import fxshard
from fxshard.bench.contenders import BF16, fsdp2_tensor_parallel, ours_tensor_parallel
from fxshard.bench.models import LlamaConfig
from fxshard.bench.tensor_parallel import PARTS, parallelize
from fxshard.bench.workloads import Size, Workload, loss_of
from tests.training import deliver, random_gradients

SIZE = Size(LlamaConfig(vocab=512, dim=256, layers=8, heads=4, hidden=512), 2, 256)
WORKLOAD = Workload("small", size=SIZE, sharing=PARTS)
CASES: dict[str, dict[str, Any]] = {
    "eager": {"lowering": "eager"},
    "inductor": {},
    "ZeRO-1": {"zero": 1},
    "CUDA graphs": {"cuda_graphs": True},
}


def losses(make: Any, device: torch.device, steps: int = 6) -> list[float]:
    plain, inputs = WORKLOAD.build(device)
    model, optimizer = make(plain)
    found = []
    for _ in range(steps):
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    if isinstance(model, fxshard.ShardedModule):
        model.delete_cuda_graphs()  # before NCCL's communicators are destroyed
    return found


def muon_differences(device: torch.device, **options: Any) -> list[str]:
    """Parameters that a Muon step changes in another way than it changes those of the plain model."""
    choice = fxshard.Muon(lr=2e-2)
    plain = WORKLOAD.build(device)[0]
    made, mesh = parallelize(WORKLOAD.build(device)[0])
    model, reference = fxshard.shard(made, mesh=mesh["dp"], optimizer=choice, **options), choice.build(plain)
    grads = random_gradients(plain, 0)
    deliver(model, grads)
    for name, parameter in plain.named_parameters():
        parameter.grad = grads[name].to(device)
    model.optimizer.step()
    reference.step()
    found = model.full_state_dict()
    return [
        name
        for name, value in plain.state_dict().items()
        if not torch.allclose(found[name].cpu(), value.cpu(), atol=1e-4)
    ]


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    theirs = losses(lambda model: fsdp2_tensor_parallel(model, BF16, compiled=False), device)
    for name, options in CASES.items():
        mine = losses(lambda model, options=options: ours_tensor_parallel(model, BF16, **options), device)
        assert all(abs(a - b) < 2e-2 for a, b in zip(mine, theirs, strict=True)), (name, mine, theirs)
        if dist.get_rank() == 0:
            print(f"{name}: {mine} against {theirs}", flush=True)
    for options in ({"layout": "rows"}, {"zero": 1, "layout": "whole"}):  # matrices that travel first, and that do not
        assert muon_differences(device, **options) == [], options
    print(f"rank {dist.get_rank()}: all as it should be", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
