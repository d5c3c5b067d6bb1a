"""A pass of your own: count the matrix products that run before each wait, and say so in the schedule.

python examples/custom_pass.py
torchrun --standalone --nproc-per-node 2 examples/custom_pass.py

What to look at: the list of passes with the new one in it, and its note in the schedule's last column.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import fx

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.passes.context import PassContext
from fxshard.schedule.events import META, Kind, events

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def note_products(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Append to the reason of every wait how many matrix products have run by then, for ``print(model.schedule)``."""
    done = {}
    for node in module.graph.nodes:
        done[node] = len(done) and done[node.prev] + (node.target in MATMULS)
    for node, event in events(module.graph):
        if event.kind is Kind.WAIT:
            node.meta[META] = replace(event, why=f"{event.why}; after {done[node]} products")
    return module


def main() -> None:
    passes = fxshard.PASSES.after("insert_reshard", note_products).without("defer_wgrad")
    torch.manual_seed(0)
    config = LlamaConfig(vocab=64, dim=32, layers=2, heads=2, hidden=64)
    model = fxshard.compile(Llama(config), optimizer=fxshard.AdamW(lr=1e-2), lowering="eager", passes=passes)
    tokens = torch.randint(config.vocab, (4, 17))
    for _ in range(3):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(passes, end="\n\n")
        print(model.schedule)
        print(f"\nloss {loss.item():.3f} after three steps. Look at the reasons of the waits.")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
