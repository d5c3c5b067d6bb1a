"""Tensor parallelism, ZeRO-3 over the data-parallel dimension. What to look at: placements and the schedule.

torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py
"""

import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxshard


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 128), "down": nn.Linear(128, 32)}) for _ in "ab")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return nn.functional.mse_loss(x, y)


mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("dp", "tp"))
model = parallelize_module(Model(), mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
model = fxshard.compile(model, mesh=mesh["dp"], optimizer=fxshard.Muon(lr=0.02), lowering=(*sys.argv, "inductor")[1])
torch.manual_seed(mesh["dp"].get_local_rank())  # tensor-parallel ranks get the same batch
for _ in range(3):
    loss = model(torch.randn(8, 32), torch.randn(8, 32))
    loss.backward()
    model.clip_grad_norm_(1.0)
    model.optimizer.step()
    model.optimizer.zero_grad()
if mesh.get_rank() == 0:
    print(f"loss {loss.item():.4f}", {name: p.placements for name, p in model.layers[0].named_parameters()})
    print(model.schedule)
