"""Models inside the block of torch's ``context_parallel``: losses and gradients of whole sequences. Run by torchrun:

torchrun --standalone --nproc-per-node 2 tests/gpu/context_parallel_on_ranks.py
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxshard
from tests.training import full_gradients

LENGTH, VOCAB, DIM = 512, 256, 512
PRECISION = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(2, (8, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.Sequential(*[Layer() for _ in range(6)])

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        x = self.layers(self.embed(tokens) + self.place(positions))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def plain(device: torch.device) -> Model:
    torch.manual_seed(0)
    return Model().to(device)


def batch(step: int, device: torch.device) -> list[Tensor]:
    text = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(step)).to(device)
    return [text[:, :-1].contiguous(), text[:, 1:].contiguous(), torch.arange(LENGTH, device=device)]


def wanted(device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of whole sequences in one process, and the gradients of the first."""
    model = plain(device).bfloat16()
    losses = [model(*batch(step, device)) for step in range(3)]
    losses[0].backward()
    return [float(loss.detach()) for loss in losses], {name: p.grad for name, p in model.named_parameters()}


def mean(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def check(device: torch.device, **options: Any) -> None:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = fxshard.compile(plain(device), mesh=mesh, precision=PRECISION, **options)
    losses, grads = wanted(device)
    rank = dist.get_rank()
    part = [x[..., rank * (x.shape[-1] // 2) :][..., : x.shape[-1] // 2].contiguous() for x in batch(0, device)]
    own = mean(model(*part))  # captured outside of the block first, with the shapes that it has inside
    assert abs(own - losses[0]) > 1e-4, "attention to this rank's tokens alone gives another loss"
    found = []
    for step in range(12):  # in blocks of their own, as in a training loop
        buffers = batch(step % 3, device)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers=set(buffers)):
            loss = model(*buffers)
            if step == 0:
                loss.backward()
        found.append(mean(loss))
    assert all(abs(a - b) < 2e-3 for a, b in zip(found, losses * 4, strict=True)), (found, losses)
    for name, whole in full_gradients(model).items():
        reference = grads[name].float().cpu()
        assert (whole.float().cpu() - reference).norm() < 3e-2 * reference.norm(), name
    assert mean(model(*part)) == own, "outside of the block again"
    with torch.no_grad(), context_parallel(mesh, buffers=(given := batch(1, device)), buffer_seq_dims=[1, 1, 0]):
        assert abs(mean(model(*given)) - losses[1]) < 2e-3
    assert model.report.compilations.captures == 3, "outside and inside of blocks, and an evaluation"
    sent = {event.op for event in model.schedule.events if event.op}
    if rank == 0:
        print(options, found[:3], losses, sent, flush=True)
    model.delete_cuda_graphs()


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        for method in ("allgather", "alltoall"):
            set_rotate_method(method)
            check(device, lowering="eager")
            check(device, zero=3)
        check(device, zero=1)
    print(f"rank {dist.get_rank()}: all as it should be", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
