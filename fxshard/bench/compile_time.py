"""Time to the first step and number of compilations by depth, each in a fresh process with an empty compiler cache.

python -m fxshard.bench.compile_time --device cuda --model 1b,hf:llama --peer fsdp2-compile --rounds 5
python -m fxshard.bench.compile_time --device cuda --layers 8,32 --peer fsdp2-compile --trace-all
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import fxshard
from fxshard._torch import private
from fxshard._torch.progress import progress
from fxshard.bench.contenders import BF16, blocks, fsdp2
from fxshard.bench.harness import Column, Row, Table, add_device, in_fresh_process, parser_of, write
from fxshard.bench.models import LlamaConfig
from fxshard.bench.workloads import Inputs, Size, Workload, add_models, loss_of

PEER, TRACE_ALL = "fsdp2-compile", "fxshard-trace-all"
LEAST = 0.05
"""Seconds of a stage that is worth a line."""
Case = tuple[str | None, str | None, str]
"""Model, number of layers, contender; None: as by default."""
COLUMNS = (
    *(Column(key, key.replace("_", " "), ".0f") for key in ("segments", "compilations", "layers_folded")),
    Column("first_step_s", "first step s", ratio=True, bars="time to the first step", unit="s"),
    Column("cpu_s", "CPU s", ratio=True),
    Column("warm_s", "second start s", ratio=True, bars="again, with a warm cache", unit="s"),
    Column("warm_cpu_s", "CPU s", ratio=True),
    Column("loss", "loss", ".4f"),
)


def workload_of(arguments: argparse.Namespace) -> Workload:
    """The model of a process that measures: the one it was given, or a small Llama."""
    layers = int(arguments.layers) if arguments.layers else None
    if arguments.model:
        return Workload(arguments.model[0], layers, cache=not arguments.no_cache)
    return Workload("small", layers, size=Size(LlamaConfig(vocab=1024, dim=256, heads=4, hidden=704), 2, 256))


def measure(workload: Workload, device: str, contender: str) -> dict[str, Any]:
    """Shard, compile and run one training step, alone. Importing compilers is part of the time."""
    model, inputs = workload.build(torch.device(device))
    precision = BF16 if device == "cuda" and workload.size is None else None
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    found: dict[str, Any] = {"model": workload.name, "layers": len(blocks(model)), "name": contender}
    start, cpu = time.perf_counter(), _cpu_seconds()
    if contender == PEER:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        wrapped, optimizer = fsdp2(model, precision, compiled=True)
        loss = _step(wrapped, optimizer, inputs)
    else:
        debug = fxshard.Debug(fold_layers=contender != TRACE_ALL)
        sharded = fxshard.compile(model, optimizer=fxshard.AdamW(), precision=precision, debug=debug)
        loss = _step(sharded, sharded.optimizer, inputs)
    found["first_step_s"] = time.perf_counter() - start
    found["cpu_s"] = _cpu_seconds() - cpu
    found["loss"] = float(loss)
    found["stages"] = private.compile_clocks()
    if contender == PEER:
        dist.destroy_process_group()
        return found
    start = time.perf_counter()
    sharded.schedule.verify()
    found["verify_s"] = time.perf_counter() - start
    found["segments"] = sharded.report.compilations.segments
    found["compilations"] = sharded.report.compilations.compiled
    found["layers_folded"] = sharded.report.compilations.layers_folded
    return found


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs) -> torch.Tensor:
    loss = loss_of(model, inputs)
    loss.backward()
    optimizer.step()
    if loss.is_cuda:
        torch.cuda.synchronize()
    return loss.detach()


def _cpu_seconds() -> float:
    """CPU seconds of this process and of those it has waited for (compilers)."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def in_fresh_processes(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure with nothing compiled before, then once more with what that left in the compiler's cache."""
    model, layers, contender = case
    command = ["-m", "fxshard.bench.compile_time", "--contender", contender]
    command += ["--device", arguments.device]
    command += ["--model", model] if model else []
    command += ["--layers", layers] if layers else []
    command += ["--no-cache"] if arguments.no_cache else []
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        starts = [in_fresh_process(*command, env=environment) for _ in range(2)]
    again = {"warm_s": "first_step_s", "warm_cpu_s": "cpu_s", "warm_stages": "stages"}
    return {**starts[0], **{name: starts[1][measured] for name, measured in again.items()}}


def main() -> None:
    parser = parser_of(__doc__)
    add_device(parser)
    add_models(parser, default="a small Llama in fp32; the others are in bf16 on CUDA")
    parser.add_argument("--layers", metavar="N,...", help="depths to compare (default: 8,32, or what a model has)")
    parser.add_argument("--peer", choices=(PEER,), help="FSDP2 with each block compiled as well")
    parser.add_argument("--trace-all", action="store_true", help="fxshard with Debug(fold_layers=False) as well")
    parser.add_argument("--stages", action="store_true", help="also where the time went, by torch's own clocks")
    parser.add_argument("--rounds", type=int, default=1, help="times that each takes its turn; medians (default: 1)")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        print(json.dumps(measure(workload_of(arguments), arguments.device, arguments.contender)))
        return
    default = [None] if arguments.model else ["8", "32"]
    depths = arguments.layers.split(",") if arguments.layers else default
    contenders = [
        "fxshard",
        *([TRACE_ALL] if arguments.trace_all else []),
        *([arguments.peer] if arguments.peer else []),
    ]
    cases: list[Case] = list(itertools.product(arguments.model or [None], depths, contenders))
    measured: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    with progress(len(cases) * arguments.rounds) as begin:
        for case in cases * arguments.rounds:
            begin(f"{' '.join(part for part in case if part)}, in fresh processes")
            measured[case].append(in_fresh_processes(case, arguments))
    rows = [{**median(each), "rounds": each} for each in measured.values()]
    tables = list(compared(rows))
    for table in tables:
        print(f"\n{table}")
        if arguments.stages:
            print(stages(table.rows))
    write(arguments.json, tables)


def compared(rows: list[Row]) -> Iterator[Table]:
    """By model and depth. Ratios are to the peer, where there is one."""
    for (model, layers), alike in itertools.groupby(rows, key=lambda row: (row["model"], row["layers"])):
        own = list(alike)
        base = PEER if any(row["name"] == PEER for row in own) else own[0]["name"]
        yield Table(f"{model}, {layers} layers", COLUMNS, own, base)


def median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure; of clocks, too, which count nothing where they did not run."""
    found = dict(rounds[0])
    for name, value in rounds[0].items():
        if isinstance(value, float):
            found[name] = statistics.median(each[name] for each in rounds)
        elif isinstance(value, dict):
            clocks = sorted({clock for each in rounds for clock in each[name]})
            found[name] = {clock: statistics.median(each[name].get(clock, 0.0) for each in rounds) for clock in clocks}
    return found


def stages(rows: Sequence[Row]) -> str:
    """Seconds of what torch has clocks for, where it took any time; one may lie in another."""
    lines = []
    for row in rows:
        named = sorted({*row["stages"], *row["warm_stages"]})
        taken = [(name, row["stages"].get(name, 0.0), row["warm_stages"].get(name, 0.0)) for name in named]
        lines.append(f"\n{row['name']}, {row['layers']} layers{'first':>52}{'second':>10}")
        shown = sorted((each for each in taken if max(each[1:]) >= LEAST), key=lambda each: -each[1])
        lines += [f"{name:<60}{first:>8.2f} s{second:>8.2f} s" for name, first, second in shown]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
