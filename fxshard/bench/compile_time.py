"""Time to the first step and number of compilations by depth, each in a fresh process with an empty compiler cache.

python -m fxshard.bench.compile_time --device cuda --layers 8,32
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import fxshard
from fxshard.inspect.progress import progress
from fxshard.models import Llama, LlamaConfig


def measure(layers: int, device: str, dim: int) -> dict[str, float]:
    """Shard, compile and run one training step of a Llama with ``layers`` layers, alone."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab=1024, dim=dim, layers=layers, heads=dim // 64, hidden=dim * 11 // 4)
    with torch.device(device):
        model = Llama(config)
        tokens = torch.randint(0, config.vocab, (2, 256))
    start = time.perf_counter()
    sharded = fxshard.compile(model, optimizer=fxshard.AdamW())
    sharded(tokens, tokens).backward()
    sharded.optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    start = time.perf_counter()
    sharded.schedule.verify()
    checked = time.perf_counter() - start
    return {
        "layers": layers,
        "segments": sharded.compilations.segments,
        "compilations": sharded.compilations.compiled,
        "first_step_s": first,
        "verify_s": checked,
    }


def in_fresh_process(layers: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure with nothing compiled before."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "fxshard.bench.compile_time", "--one", str(layers)]
        command += ["--device", arguments.device, "--dim", str(arguments.dim)]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--layers", default="8,32", metavar="N,...", help="depths to compare (default: 8,32)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=best, help=f"(default here: {best})")
    parser.add_argument("--dim", type=int, default=256, help="width of the model, a multiple of 64 (default: 256)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.device, arguments.dim)))
        return
    rows = []
    depths = [int(layers) for layers in arguments.layers.split(",")]
    with progress(len(depths)) as begin:
        for layers in depths:
            begin(f"{layers} layers in a fresh process")
            rows.append(in_fresh_process(layers, arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    print(f"{'layers':>7}{'segments':>10}{'compilations':>14}{'first step s':>14}{'ratio':>8}{'verify ms':>11}")
    for row in rows:
        ratio = row["first_step_s"] / rows[0]["first_step_s"]
        print(
            f"{row['layers']:>7}{row['segments']:>10}{row['compilations']:>14}{row['first_step_s']:>14.1f}{ratio:>8.2f}"
            f"{row['verify_s'] * 1e3:>11.1f}"
        )


if __name__ == "__main__":
    main()
