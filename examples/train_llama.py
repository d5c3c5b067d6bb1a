"""Train a small Llama on a poem: sharded over the processes of torchrun, or alone.

torchrun --standalone --nproc-per-node 2 examples/train_llama.py
python examples/train_llama.py --zero 0 --lowering eager

What to look at: the loss falls; then the schedule. Layers are gathered one ahead and released after their last use, in
backward their gradients are reduced while the next ones are computed, and the optimizer phase starts the gathers that
the next step begins with. Try ``--zero 2``: parameters stay, and only gradients and updated parameters move.
"""

import argparse
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import fxshard
from fxshard.bench.models import Llama, LlamaConfig

POEM = """\
'Twas brillig, and the slithy toves
Did gyre and gimble in the wabe:
All mimsy were the borogoves,
And the mome raths outgrabe.

"Beware the Jabberwock, my son!
The jaws that bite, the claws that catch!
Beware the Jubjub bird, and shun
The frumious Bandersnatch!"

He took his vorpal sword in hand:
Long time the manxome foe he sought--
So rested he by the Tumtum tree,
And stood awhile in thought.

And, as in uffish thought he stood,
The Jabberwock, with eyes of flame,
Came whiffling through the tulgey wood,
And burbled as it came!

One, two! One, two! And through and through
The vorpal blade went snicker-snack!
He left it dead, and with its head
He went galumphing back.
"""  # Lewis Carroll, 1871

CONFIG = LlamaConfig(vocab=256, dim=128, layers=4, heads=4, hidden=384)
BATCH, LENGTH = 8, 64


def main() -> None:
    options = arguments()
    os.environ.setdefault("FXSHARD_PROGRESS", "0")  # there is a bar here already
    torch.manual_seed(0)
    model = fxshard.compile(
        Llama(replace(CONFIG, layers=options.layers)),
        zero=options.zero,
        optimizer=fxshard.AdamW(lr=2e-3),
        lowering=options.lowering,
    )
    # Under torchrun, compile has made the process group.
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    data = torch.Generator().manual_seed(rank)  # every rank reads its own part of the batch

    losses = []
    with progress(ranks, shown=rank == 0) as bar:
        task = bar.add_task("compiling", total=options.steps, loss="")
        for _ in range(options.steps):
            x, y = batch(data)
            loss = model(x, y)
            loss.backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
            losses.append(mean(loss))
            bar.update(task, advance=1, description="training", loss=f"loss {losses[-1]:.3f}")

    if rank == 0:
        print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {options.steps}")
        print(model.schedule)
    if dist.is_initialized():
        dist.destroy_process_group()
    if not losses[-1] < losses[0]:
        sys.exit(f"the loss did not fall: {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Stretches of the poem as bytes, and the same stretches one byte further on."""
    text = torch.tensor(list(POEM.encode()))
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    stretches = text[starts + torch.arange(LENGTH + 1)]
    return stretches[:, :-1].contiguous(), stretches[:, 1:].contiguous()


def mean(loss: torch.Tensor) -> float:
    """The loss of the whole batch: each rank has that of its own part."""
    loss = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def progress(ranks: int, shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn(f"on {ranks} process{'es' if ranks > 1 else ''}"),
        console=Console(stderr=True),
        disable=not (shown and sys.stderr.isatty()),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama on a poem.")
    parser.add_argument("--zero", type=int, default=3, help="what is sharded: 0 nothing, 3 everything (default 3)")
    parser.add_argument("--steps", type=int, default=60, help="training steps, at least 2 (default 60)")
    parser.add_argument("--layers", type=int, default=CONFIG.layers, help="of the model (default 4)")
    parser.add_argument("--lowering", default="inductor", help="inductor, or eager to compile nothing")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps: whether the loss falls needs at least 2")
    return options


if __name__ == "__main__":
    main()
