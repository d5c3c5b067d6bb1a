"""Time to the first step and number of compilations by depth, each in a fresh process with an empty compiler cache.

python -m fxshard.bench.compile_time --device cuda --layers 8,32 --peer fsdp2-compile
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import fxshard
from fxshard.bench.train import fsdp2
from fxshard.inspect.progress import progress
from fxshard.models import Llama, LlamaConfig


def measure(layers: int, device: str, dim: int, contender: str) -> dict[str, float]:
    """Shard, compile and run one training step of a Llama with ``layers`` layers, alone."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab=1024, dim=dim, layers=layers, heads=dim // 64, hidden=dim * 11 // 4)
    with torch.device(device):
        model = Llama(config)
        tokens = torch.randint(0, config.vocab, (2, 256))
    found: dict[str, float] = {"layers": layers}
    start, cpu = time.perf_counter(), _cpu_seconds()
    if contender == "fsdp2-compile":
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        wrapped, optimizer = fsdp2(model, None, compiled=True)
        _step(wrapped, optimizer, tokens)
    else:
        sharded = fxshard.compile(model, optimizer=fxshard.AdamW())
        _step(sharded, sharded.optimizer, tokens)
    found["first_step_s"] = time.perf_counter() - start
    found["cpu_s"] = _cpu_seconds() - cpu
    if contender == "fsdp2-compile":
        dist.destroy_process_group()
        return found
    start = time.perf_counter()
    sharded.schedule.verify()
    found["verify_s"] = time.perf_counter() - start
    found["segments"] = sharded.compilations.segments
    found["compilations"] = sharded.compilations.compiled
    return found


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model(tokens, tokens).backward()
    optimizer.step()
    if tokens.is_cuda:
        torch.cuda.synchronize()


def _cpu_seconds() -> float:
    """What this process and those it has waited for (compilers) have computed."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def in_fresh_processes(layers: int, contender: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure with nothing compiled before, then once more with what that left in the compiler's cache."""
    command = [sys.executable, "-m", "fxshard.bench.compile_time", "--one", str(layers), "--contender", contender]
    command += ["--device", arguments.device, "--dim", str(arguments.dim)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        starts = []
        for _ in range(2):
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            starts.append(json.loads(done.stdout.splitlines()[-1]))
    found: dict[str, float] = starts[0]
    return {**found, "warm_s": starts[1]["first_step_s"], "warm_cpu_s": starts[1]["cpu_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--layers", default="8,32", metavar="N,...", help="depths to compare (default: 8,32)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=best, help=f"(default here: {best})")
    parser.add_argument("--dim", type=int, default=256, help="width of the model, a multiple of 64 (default: 256)")
    parser.add_argument("--peer", choices=("fsdp2-compile",), help="measure FSDP2 with each block compiled as well")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--contender", default="fxshard", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.device, arguments.dim, arguments.contender)))
        return
    rows = []
    depths = [int(layers) for layers in arguments.layers.split(",")]
    with progress(len(depths)) as begin:
        for layers in depths:
            begin(f"{layers} layers in fresh processes")
            row = in_fresh_processes(layers, "fxshard", arguments)
            if arguments.peer:
                peer = in_fresh_processes(layers, arguments.peer, arguments)
                row |= {f"peer_{name}": value for name, value in peer.items() if name != "layers"}
            rows.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    _print(rows)


def _print(rows: list[dict[str, float]]) -> None:
    """Seconds of wall time, CPU seconds behind them."""
    columns = ["first step", "again, warm cache"]
    columns += ["FSDP2 + compile", "again, warm cache"] if "peer_cpu_s" in rows[0] else []
    print(
        f"{'layers':>7}{'segments':>10}{'compilations':>14}"
        + "".join(f"{name:>20}" for name in columns)
        + "   CPU ratio"
    )
    for row in rows:
        cells = []
        for prefix in ("", "peer_") if "peer_cpu_s" in row else ("",):
            for wall, cpu in (("first_step_s", "cpu_s"), ("warm_s", "warm_cpu_s")):
                cells.append(f"{row[prefix + wall]:.1f} s ({row[prefix + cpu]:.1f})")
        base = row.get("peer_cpu_s", rows[0]["cpu_s"])
        print(
            f"{row['layers']:>7}{row['segments']:>10}{row['compilations']:>14}"
            + "".join(f"{cell:>20}" for cell in cells)
            + f"{row['cpu_s'] / base:>12.2f}"
        )


if __name__ == "__main__":
    main()
