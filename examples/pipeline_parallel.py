"""Two pipeline stages, each with ZeRO-3 over its data-parallel ranks. What to look at: when it reduces.

torchrun --standalone --nproc-per-node 4 examples/pipeline_parallel.py
"""

import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

import fxshard
from fxshard.integrations.pipelining import PipelineStage


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("dp", "pp"))
number, replica, group = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), mesh.get_group("pp")
model = fxshard.compile(  # this rank's half of the layers
    nn.Sequential(*(Layer() for _ in range(3))),
    mesh=mesh["dp"],
    zero=3,
    optimizer=fxshard.AdamW(lr=1e-3),
    lowering=(*sys.argv, "inductor")[1],
)
stage = PipelineStage(model, number, 2, torch.device("cpu"), group=group)
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
torch.manual_seed(replica)  # the stages of a replica work on the same batch
for _ in range(3):
    x, y = torch.randn(2, 16, 32).unbind()
    losses: list[torch.Tensor] = []
    schedule.step(*([x] if number == 0 else []), target=y if number == 1 else None, losses=losses)
    model.optimizer.step()
    model.optimizer.zero_grad()
if (replica, number) == (0, 1):
    print(f"loss {torch.stack(losses).mean():.4f} over {len(losses)} micro-batches")
    for name in ("accumulate", "train"):  # all micro-batches but the last, and the last
        print(f"{name}:\n{model.schedules[name]}")
