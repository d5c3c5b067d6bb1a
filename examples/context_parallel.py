"""Sequences cut over two ranks, ZeRO-3 over all ranks. What to look at: gathers of keys and values in the schedule.

torchrun --standalone --nproc-per-node 4 examples/context_parallel.py
"""

import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.integrations.context_parallel import ContextParallel


class Layer(nn.Module):
    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self.qkv, self.out, self.context = nn.Linear(32, 96), nn.Linear(32, 32), context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(self.context.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(64, 32), nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.Sequential(Layer(context), Layer(context))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embed(tokens) + self.place(positions))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("dp", "cp"))
context = ContextParallel(mesh["cp"])
every = mesh._flatten("dp_cp")  # parameters are sharded over all ranks
adamw, lowering = fxshard.AdamW(lr=1e-2), (*sys.argv, "inductor")[1]
model = fxshard.compile(Model(context), mesh=every, zero=3, optimizer=adamw, lowering=lowering)
torch.manual_seed(mesh.get_local_rank("dp"))  # ranks that share sequences draw the same
for _ in range(3):
    text = torch.randint(64, (2, 65))
    tokens, labels = context.shard(text[:, :-1], text[:, 1:])  # shifted first, then cut
    loss = model(tokens, labels, context.positions(64))
    loss.backward()
    model.optimizer.step()
    model.optimizer.zero_grad()
if mesh.get_rank() == 0:
    print(f"loss {loss.item():.4f} on {tokens.shape[1]} of 64 tokens")
    print(model.schedule)
