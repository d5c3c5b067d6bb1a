"""Train one language model with several recipes of optimizer and precision, byte by byte on the source of Python's own
library: losses of every step as JSON, a table, and curves.

python examples/convergence.py --recipes adamw,adamw-seed1,muon --json losses.json     # 113 M parameters: for a GPU
python examples/convergence.py --quick --device cpu                                    # to see that it runs
python -m fxshard.bench.curves losses.json --svg losses.svg                            # draws them again

Recipes run one after another, each from a fresh model; the file is written after each. All but ``adamw-seed1`` have
the same initial values and batches. What to look at: how far a recipe ends from ``adamw``, next to how far two seeds of
``adamw`` are apart. Losses stay on the device until a run is over, so that no step waits for one.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fxshard
from fxshard._torch.progress import progress
from fxshard.bench.curves import table, to_svg
from fxshard.bench.models import Llama, LlamaConfig

SMALL = LlamaConfig(vocab=256, dim=128, layers=1, heads=4, hidden=384)
LARGE = LlamaConfig(vocab=256, dim=768, layers=16, heads=12, hidden=2048)
TIMES = 20
"""How often the loss on text kept back is measured in a run."""


@dataclass(frozen=True)
class Recipe:
    optimizer: Callable[[float], fxshard.AdamW | fxshard.Muon]
    scaling: str | None = None
    """Of float8; none: bf16, on a CPU fp32."""
    seed: int = 0


def adamw(**choices: Any) -> Callable[[float], fxshard.AdamW]:
    return lambda lr: fxshard.AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1, **choices)


def muon(kind: type[fxshard.Muon] = fxshard.Muon, **choices: Any) -> Callable[[float], fxshard.Muon]:
    """With updates of AdamW's size, so that one learning rate suits both."""
    inner = adamw()
    return lambda lr: kind(lr=lr, scale="rms", weight_decay=0.1, adamw=inner(lr), **choices)


RECIPES = {
    "adamw": Recipe(adamw()),
    "adamw-seed1": Recipe(adamw(), seed=1),
    "adamw-bf16": Recipe(adamw(state="bf16")),
    "adamw-8bit": Recipe(adamw(state="8bit")),
    "adamw-8bit-host": Recipe(adamw(state="8bit", offload="host")),
    "float8-tensor": Recipe(adamw(), scaling="tensor"),
    "float8-row": Recipe(adamw(), scaling="row"),
    "float8-block": Recipe(adamw(), scaling="block"),
    "muon": Recipe(muon()),
    "muon-8bit": Recipe(muon(state="8bit")),
    "normuon": Recipe(muon(fxshard.NorMuon)),
}


def corpus(folder: Path) -> torch.Tensor:
    """Bytes of all Python files below a folder, in the order of their names; what was installed besides is left out."""
    files = [file for file in sorted(folder.rglob("*.py")) if "site-packages" not in file.relative_to(folder).parts]
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def stretches(text: torch.Tensor, count: int, length: int, seed: int) -> torch.Tensor:
    """Where ``count`` stretches begin, on the device of the text."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(len(text) - length - 1, (count,), generator=draw).to(text.device)


def batch(text: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = text[starts.unsqueeze(1) + torch.arange(length + 1, device=text.device)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def made(recipe: Recipe, options: argparse.Namespace) -> fxshard.ShardedModule:
    torch.manual_seed(recipe.seed)
    with torch.device(options.device):
        plain = Llama(SMALL if options.quick else LARGE)
    precision: Any = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32) if options.bf16 else None
    if recipe.scaling is not None:
        precision = fxshard.Float8(scaling=recipe.scaling, smallest=0 if options.quick else 384)
    return fxshard.compile(
        plain,
        precision=precision,
        optimizer=recipe.optimizer(options.lr),
        lowering=options.lowering,
        cuda_graphs=options.cuda_graphs,
    )


def train(recipe: Recipe, text: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Losses of every step and of text kept back (before the first, then every so many), seconds after the second."""
    model = made(recipe, options)
    warmup = max(1, options.steps // 20)
    rate = torch.optim.lr_scheduler.LambdaLR(
        model.optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / options.steps))
    )
    cut = len(text) * 49 // 50
    starts = stretches(text[:cut], options.steps * options.batch, options.length, 100 + recipe.seed)
    kept_back = stretches(text[cut:], 4 * options.batch, options.length, 0).split(options.batch)
    every = max(1, options.steps // TIMES)

    @torch.no_grad()
    def measured() -> torch.Tensor:
        return torch.stack([model(*batch(text[cut:], of_one, options.length)) for of_one in kept_back]).mean()

    began = begin = time.perf_counter()
    losses, held_out = [], [measured()]
    for step, of_step in enumerate(starts.split(options.batch)):
        loss = model(*batch(text, of_step, options.length))
        loss.backward()
        model.clip_grad_norm_(1.0)
        model.optimizer.step()
        model.optimizer.zero_grad()
        rate.step()
        losses.append(loss.detach())
        if (step + 1) % every == 0:
            held_out.append(measured())
        if step == 1:  # everything is compiled
            losses[-1].item()
            begin = time.perf_counter()
    found = {"losses": torch.stack(losses).tolist(), "held_out": torch.stack(held_out).tolist(), "every": every}
    now = time.perf_counter()
    return {**found, "seconds": now - begin, "first_seconds": begin - began}


def main() -> None:
    options = arguments()
    text = corpus(options.text).to(options.device)
    written: dict[str, Any] = {
        "about": {
            "parameters": parameters(SMALL if options.quick else LARGE),
            "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
            "torch": torch.__version__,
            "bytes": len(text),
            **{name: getattr(options, name) for name in ("steps", "batch", "length", "lr")},
        },
        "runs": {},
    }
    with progress(len(options.recipes)) as begin:
        for name in options.recipes:
            begin(f"{name}, {options.steps} steps")
            run = written["runs"][name] = train(RECIPES[name], text, options)
            timing = f"{run['seconds']:.0f} s, and {run['first_seconds']:.0f} s for the first two steps"
            print(f"{name}: loss {run['losses'][-1]:.4f} at the last step, {timing}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(written))
    print(table(written["runs"]))
    if options.svg is not None:
        options.svg.write_text(to_svg(written["runs"], f"{written['about']['parameters'] / 1e6:.0f} M parameters"))


def parameters(config: LlamaConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama(config).parameters())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Losses of one language model under several recipes.")
    parser.add_argument("--recipes", help=f"of {', '.join(RECIPES)}; default: all of them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="default 1000, 20 with --quick")
    parser.add_argument("--lr", type=float, default=6e-4, help="warmed up, then a cosine to a tenth (default 6e-4)")
    parser.add_argument("--batch", type=int, help="sequences in a step (default 16, 2 with --quick)")
    parser.add_argument("--length", type=int, help="bytes of a sequence (default 1024, 32 with --quick)")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder of Python files")
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--quick", action="store_true", help="a small model, a few steps, nothing compiled")
    parser.add_argument("--json", type=Path, help="write all losses into this file")
    parser.add_argument("--svg", type=Path, help="draw the curves into this file")
    options = parser.parse_args()
    options.recipes = options.recipes.split(",") if options.recipes else list(RECIPES)
    unknown = [name for name in options.recipes if name not in RECIPES]
    if unknown:
        parser.error(f"--recipes: {unknown[0]!r} is none of {', '.join(RECIPES)}")
    on_gpu = options.device == "cuda"
    options.bf16 = on_gpu
    options.cuda_graphs = on_gpu and not options.quick if options.cuda_graphs is None else options.cuda_graphs
    options.lowering = "eager" if options.quick else "inductor"
    options.steps = options.steps or (20 if options.quick else 1000)
    options.batch = options.batch or (2 if options.quick else 16)
    options.length = options.length or (32 if options.quick else 1024)
    return options


if __name__ == "__main__":
    main()
