"""``cuda_graphs=True`` on several ranks, bitwise like the same model without it. Run by torchrun:

torchrun --standalone --nproc-per-node 2 tests/gpu/graphs_on_ranks.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import fxshard
from fxshard.bench.models import Llama
from tests.gpu.test_cuda_graphs import BF16, DENSE, EXPERTS, language_model, tokens
from tests.replaying import counts, reasons


def train(zero: int, config: fxshard.bench.models.LlamaConfig, graphs: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain: Llama = language_model(config)
    optimizer = fxshard.AdamW(lr=1e-3)
    model = fxshard.compile(plain, zero=zero, precision=BF16, optimizer=optimizer, lowering="eager", cuda_graphs=graphs)
    left = []
    for number in range(6):
        x = tokens(number * dist.get_world_size() + dist.get_rank())
        if number == 4:
            with model.no_sync():
                model(x, x).backward()
        loss = model(x, x)
        loss.backward()
        model.clip_grad_norm_(1.0)
        model.optimizer.step()
        model.optimizer.zero_grad()
        left.append(loss.detach())
    if graphs and dist.get_rank() == 0:
        print(f"zero {zero}, {config.experts} experts: {counts(model)} {reasons(model)}", flush=True)
    assert not graphs or counts(model)[1] >= 4
    model.delete_cuda_graphs()
    return left + [value.to_local() for value in model.parameters()]


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for zero in (3, 2, 1):
        for config in (DENSE, EXPERTS) if zero == 3 else (DENSE,):
            with_graphs, without = train(zero, config, True), train(zero, config, False)
            assert all(torch.equal(a, b) for a, b in zip(with_graphs, without, strict=True)), (zero, config)
    print(f"rank {dist.get_rank()}: bitwise equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
