"""Lightning's Trainer on GPUs: fit, validate in inference mode, save and resume through Inductor, beside plain PyTorch.

torchrun --standalone --nproc-per-node 1 -m tests.gpu.lightning_on_ranks

Ranks that share a GPU are nodes of one rank each, for Lightning gives every rank of a node a GPU of its own:

torchrun --nnodes 2 --node-rank 0 --master-port 29500 --nproc-per-node 1 -m tests.gpu.lightning_on_ranks & (and 1)
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.integrations.launched import llama, rows
from tests.integrations.test_lightning import INSTALLED, PARTS, STEPS, fit, own

SETTINGS = {"accelerator": "gpu", "use_distributed_sampler": False}


def by_plain_torch(ranks: int) -> tuple[list[float], float]:
    """The losses of an epoch, added up over ranks that all get the same rows, and that of validation after it."""
    model, losses = llama().cuda(), []
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for i, row in enumerate(rows(2 * PARTS * STEPS)):
        loss = model(**{name: value[None].cuda() for name, value in row.items()}).loss
        losses.append(ranks * float(loss.detach()))
        (loss / PARTS).backward()
        if i % PARTS == PARTS - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    with torch.no_grad():
        held_out = [model(**{name: value[None].cuda() for name, value in row.items()}).loss for row in rows(4, 10)]
    return losses, float(torch.stack(held_out).mean())


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    ranks, package = dist.get_world_size(), INSTALLED[0]
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    settings = {**SETTINGS, "devices": devices, "num_nodes": ranks // devices, "max_epochs": 2}
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    strategy = type(own(package))
    expected, validated = by_plain_torch(ranks)
    module, _ = fit(package, strategy(zero=3), str(folder), **settings)
    epoch = len(expected)
    assert module.losses[:epoch] == pytest.approx(expected, rel=1e-3), (module.losses[:3], expected[:3])
    first = module.validated[-2]
    assert first == pytest.approx(validated, rel=1e-3), (module.validated, validated)
    checkpoint = str(folder / "epoch=0.ckpt")
    again, _ = fit(package, strategy(zero=3), str(folder / "again"), ckpt_path=checkpoint, **settings)
    assert again.losses == pytest.approx(module.losses[epoch:], rel=1e-4)
    assert again.model.schedules["train"] and next(again.model.parameters()).is_cuda
    if dist.get_rank() == 0:
        print(f"{ranks} ranks: {epoch} losses, validation {first:.5f} (plain {validated:.5f}), resumed: all equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
