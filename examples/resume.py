"""Train a small Llama that may be killed at any time: start it again and it goes on where it was saved last.

torchrun --standalone --nproc-per-node 2 examples/resume.py --folder runs/a
torchrun --standalone --nproc-per-node 2 examples/resume.py --folder runs/a --die-in save --die-at 6
torchrun --standalone --nproc-per-node 2 examples/resume.py --folder runs/a

What to look at: the second run is killed while it saves; the third goes on from the last complete checkpoint, with the
losses that a run without interruption has.

With replicas of each shard (HSDP), a run that lost some of its ranks goes on with those that are left:

torchrun --standalone --nproc-per-node 4 examples/resume.py --folder runs/b --shard-size 2 --die-in step
torchrun --standalone --nproc-per-node 2 examples/resume.py --folder runs/b --shard-size 2
"""

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard.bench.models import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=64, dim=32, layers=2, heads=2, hidden=64)
BATCH, LENGTH = 4, 16


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    torch.manual_seed(0)
    optimizer = fxshard.Muon(lr=2e-2, adamw=fxshard.AdamW(lr=3e-3))
    mesh = replicas(options.shard_size)
    model = fxshard.compile(Llama(CONFIG), zero=3, optimizer=optimizer, mesh=mesh, lowering=options.lowering)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(model.optimizer, options.steps)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)  # the data comes from torch's generator here, so its state is the position in the data

    first = 0
    if fxshard.latest(options.folder) is not None:
        loaded = fxshard.load(model, options.folder)
        scheduler.load_state_dict(loaded.extra["scheduler"])
        first = loaded.extra["step"]

    for step in range(first, options.steps):
        x, y = batch()
        loss = model(x, y)
        loss.backward()
        if options.die_in == "step" and step == options.die_at:
            die(rank)
        model.optimizer.step()
        model.optimizer.zero_grad()
        scheduler.step()
        value = mean(loss)
        if rank == 0:
            print(f"step {step} loss {value!r}", flush=True)
        if (step + 1) % options.every == 0:
            fxshard.save(
                model,
                options.folder / f"step-{step + 1}",
                extra={"step": step + 1, "scheduler": scheduler.state_dict()},
                asynchronous=True,  # written while the next steps run
                keep=2,
                progress=die_half_way(rank) if options.die_in == "save" and step + 1 == options.die_at else None,
            )
    fxshard.checkpoint.wait_for_save(model)
    if dist.is_initialized():
        dist.destroy_process_group()


def replicas(shard_size: int | None) -> DeviceMesh | None:
    """As many replicas as there are ranks for; None without replicas."""
    if shard_size is None:
        return None
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (world // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that count up, each sequence from somewhere else, and what comes next."""
    sequence = (torch.randint(CONFIG.vocab, (BATCH, 1)) + torch.arange(LENGTH + 1)) % CONFIG.vocab
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


def mean(loss: torch.Tensor) -> float:
    """The loss of the whole batch: each rank has that of its own part."""
    loss = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def die(rank: int) -> None:
    """The effect of kill -9 on one of the processes."""
    if rank == (dist.get_world_size() if dist.is_initialized() else 1) - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(rank: int) -> Callable[[int, int], None]:
    def watch(done: int, total: int) -> None:
        if 2 * done > total:
            die(rank)

    return watch


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama that may be killed at any time.")
    parser.add_argument("--folder", type=Path, default=Path("runs/resume"), help="where the checkpoints are")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default 20)")
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints (default 3)")
    parser.add_argument("--die-in", choices=("save", "step"), help="kill a process in the middle of one")
    parser.add_argument("--die-at", type=int, default=6, help="of which step (default 6)")
    parser.add_argument("--shard-size", type=int, help="shard over so many ranks, and replicate over the others")
    parser.add_argument("--lowering", default="inductor", help="inductor, or eager to compile nothing")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
