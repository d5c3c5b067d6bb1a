"""Train a small mixture of experts with Muon on two processes, sharded by ZeRO-3, its experts fused.

torchrun --standalone --nproc-per-node 2 examples/train_moe.py

Runs on two idle CPU cores in about a minute. What to look at: the line on top says that the experts of every layer
became one operator and which implementation runs it; the loss falls; in the schedule expert weights are gathered and
reduced like any others, and the optimizer phase says which buckets Muon updates, in which layout and why. Stacks of
experts are cut between experts, so Muon sends none of them around: there is no ``exchange``.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard

DIM, INNER, EXPERTS, CHOSEN, LAYERS = 64, 128, 8, 2, 2
BATCH, LENGTH, SYMBOLS = 8, 64, 64


class Experts(nn.Module):
    """Each token goes to the two experts that its router prefers; weights are stacked, ``[experts, out, in]``."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.gate = nn.Parameter(torch.randn(EXPERTS, INNER, DIM) * DIM**-0.5)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, DIM) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, INNER) * INNER**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        experts = chosen.reshape(-1)
        order = experts.argsort(stable=True)
        offsets = F.one_hot(experts, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        source = order // CHOSEN
        y = self.mlp(tokens[source], offsets) * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, source, y).reshape(x.shape)

    def mlp(self, x: Tensor, offsets: Tensor) -> Tensor:
        """What fxshard finds and fuses, together with the routing weight that follows it."""
        # As torch.nn.functional.grouped_mm, which can be compiled for bf16 only; both are found.
        h = F.silu(fxshard.grouped_mm(x, self.gate.mT, offs=offsets)) * fxshard.grouped_mm(x, self.up.mT, offs=offsets)
        return fxshard.grouped_mm(h, self.down.mT, offs=offsets)


class Layer(nn.Module):
    """A causal average of what came before, then experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.mix = nn.Linear(2 * DIM, DIM, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        before = F.pad(h, (0, 0, 1, 0))[:, :-1]
        x = x + self.mix(torch.cat((h, before), -1))
        return x + self.experts(self.norms[1](x))


class MixtureOfExperts(nn.Module):
    """A language model whose layers look one token back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, SYMBOLS, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small mixture of experts, sharded and fused.")
    parser.add_argument("--steps", type=int, default=60, help="training steps, at least 2 (default 60)")
    parser.add_argument("--lowering", default="inductor", help="inductor, or eager to compile nothing")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = fxshard.compile(
        MixtureOfExperts(),
        zero=3,
        optimizer=fxshard.Muon(lr=2e-2, adamw=fxshard.AdamW(lr=3e-3)),
        lowering=options.lowering,
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    data = torch.Generator().manual_seed(rank)  # every rank reads its own part of the batch
    if rank == 0:
        print(fxshard.explain(model, batch(data)))

    losses = []
    for step in range(options.steps):
        loss = model(*batch(data))
        loss.backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {losses[-1]:.3f}")
    if rank == 0:
        print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {options.steps}")
        print(model.schedule)
    if dist.is_initialized():
        dist.destroy_process_group()
    if not losses[-1] < losses[0]:
        sys.exit(f"the loss did not fall: {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences in which the next symbol is the sum of the last two, sometimes a random one."""
    symbols = torch.randint(SYMBOLS, (BATCH, LENGTH + 1), generator=generator)
    random = torch.rand(BATCH, LENGTH + 1, generator=generator) < 0.1
    for i in range(2, LENGTH + 1):
        following = (symbols[:, i - 1] + symbols[:, i - 2]) % SYMBOLS
        symbols[:, i] = torch.where(random[:, i], symbols[:, i], following)
    return symbols[:, :-1].contiguous(), symbols[:, 1:].contiguous()


if __name__ == "__main__":
    main()
