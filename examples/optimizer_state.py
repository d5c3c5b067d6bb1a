"""Train one language model with optimizer state in fp32 (two seeds), in bf16 and in 8 bits, byte by byte on the source
of Python's standard library.

python examples/optimizer_state.py --json losses.json      # 100 M parameters, 1,000 steps: for a GPU
python examples/optimizer_state.py --quick                 # a smaller model, fewer steps: to see that it runs

What to look at: how far bf16 and 8 bits end from fp32 of the same seed, next to how far two seeds of fp32 are apart.
The loss is that of text kept back, the mean of the last measurements of a run.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import torch

import fxshard
from fxshard._torch.progress import progress
from fxshard.bench.models import Llama, LlamaConfig

SMALL = LlamaConfig(vocab=256, dim=64, layers=1, heads=4, hidden=192)
LARGE = LlamaConfig(vocab=256, dim=768, layers=14, heads=12, hidden=2048)
RUNS = {
    "fp32": (0, {}),
    "fp32, another seed": (1, {}),
    "bf16": (0, {"state": "bf16"}),
    "8bit": (0, {"state": "8bit"}),
    "8bit on the host": (0, {"state": "8bit", "offload": "host"}),
}
LAST = 5
"""Measurements that are averaged for the end of a run."""


def corpus() -> torch.Tensor:
    """Bytes of the standard library's modules, packages included, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    kept = [file for file in files if not {"site-packages", "test", "tests"} & set(file.parts)]
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in kept)), dtype=torch.uint8)


def batch(text: torch.Tensor, generator: torch.Generator, options: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    starts = torch.randint(len(text) - options.length - 1, (options.batch, 1), generator=generator)
    rows = text[starts + torch.arange(options.length + 1)].long().to(options.device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(name: str, text: torch.Tensor, options: argparse.Namespace) -> dict[str, list[float]]:
    """Losses of every step, and of text kept back every so many steps."""
    seed, choices = RUNS[name]
    torch.manual_seed(seed)
    with torch.device(options.device):
        plain = Llama(SMALL if options.quick else LARGE)
    model = fxshard.compile(
        plain,
        precision=fxshard.Precision(param=torch.bfloat16, reduce=torch.float32) if options.device == "cuda" else None,
        optimizer=fxshard.AdamW(lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, **choices),
        lowering="eager" if options.quick else "inductor",
    )
    warmup = max(1, options.steps // 20)
    rate = torch.optim.lr_scheduler.LambdaLR(
        model.optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / options.steps))
    )
    cut = len(text) * 49 // 50
    held_out = [batch(text[cut:], torch.Generator().manual_seed(i), options) for i in range(4)]
    draw, losses, kept_back = torch.Generator().manual_seed(100 + seed), [], []
    begin = time.perf_counter()
    for step in range(options.steps):
        loss = model(*batch(text[:cut], draw, options))
        loss.backward()
        model.clip_grad_norm_(1.0)
        model.optimizer.step()
        model.optimizer.zero_grad()
        rate.step()
        losses.append(loss.detach())
        if (step + 1) % options.every == 0:
            with torch.no_grad():
                kept_back.append(torch.stack([model(*inputs) for inputs in held_out]).mean())
    found = {"losses": torch.stack(losses).tolist(), "kept back": torch.stack(kept_back).tolist()}
    size = sum(model.optimizer.state_bytes().values()) / 2**20
    print(f"{name:<20} {end(found):.4f} at the end, {time.perf_counter() - begin:.0f} s, moments of {size:.1f} MiB")
    return found


def end(run: dict[str, list[float]]) -> float:
    last = run["kept back"][-LAST:]
    return sum(last) / len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description="Optimizer state in fp32, bf16 and 8 bits: losses.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int, help="steps between two measurements on text kept back")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int)
    parser.add_argument("--quick", action="store_true", help="a small model, a few steps, nothing compiled")
    parser.add_argument("--json", type=Path, help="write all losses into this file")
    options = parser.parse_args()
    options.steps = options.steps or (20 if options.quick else 1000)
    options.length = options.length or (32 if options.quick else 512)
    options.every = options.every or max(1, options.steps // 40)
    text = corpus()
    runs = {}
    with progress(len(RUNS)) as begin:
        for name in RUNS:
            begin(f"{name}, {options.steps} steps")
            runs[name] = train(name, text, options)
    if options.json is not None:
        options.json.write_text(json.dumps({"steps": options.steps, "every": options.every, "runs": runs}))
    base = end(runs["fp32"])
    apart = abs(end(runs["fp32, another seed"]) - base)
    print(f"two seeds of fp32 are {apart:.4f} apart")
    for name in ("bf16", "8bit", "8bit on the host"):
        print(f"{name}: {end(runs[name]) - base:+.4f} from fp32 of the same seed")


if __name__ == "__main__":
    main()
