"""Steps under memory budgets from the smallest to the largest: predicted and measured peaks and times.

fxshard bench budget --ranks 1 --model 1b --budgets 10
fxshard bench budget --ranks 1 --model moe-1b --shares 1.0,0.5,0.25
fxshard bench budget --ranks 1 --model 1b --state auto --offload auto --shares ""

torch's own partitioner budget, under FSDP2 and torch.compile, is measured at shares of its activations.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard._torch import private
from fxshard._torch.progress import progress
from fxshard.bench.contenders import ADAMW, BF16, Make, fsdp2, ours
from fxshard.bench.harness import Column, Row, Table, add_device, parser_of, write
from fxshard.bench.train import Contender, join_ranks
from fxshard.bench.workloads import Workload, add_workloads, workloads
from fxshard.planner.hardware import hardware as known
from fxshard.planner.kept_state import kept_state
from fxshard.planner.state import AUTO, FORMATS, OFFLOADS

COLUMNS = (
    Column("budget", "budget GiB", ".3f"),
    Column("predicted", "predicted", ".3f"),
    Column("measured", "measured", ".3f", bars="peak memory", unit="GiB"),
    Column("step_ms", "step ms", bars="time of a step", unit="ms"),
    Column("simulated_ms", "simulated"),
    Column("recomputed", "again", ".0f"),
    Column("loss", "loss 4", ".5f"),
    Column("state", "optimizer state"),
)
"""*predicted*: what the schedule says that a step has allocated at its peak. *again*: kinds of values that backward
computes again. *loss 4*: of the fourth step, which no budget changes but by rounding."""


def main() -> None:
    arguments = parse()
    device = join_ranks(arguments.device)
    tables: list[Table] = []
    for workload in workloads(arguments):
        rows = []
        with progress(arguments.budgets + len(arguments.shares), shown=dist.get_rank() == 0, lines=True) as begin:
            for row in measured(workload, arguments, device):
                rows.append(row)
                begin(f"{workload.name}: {row['name']} takes {row['step_ms']:.1f} ms and {row['measured']:.3f} GiB")
        if dist.get_rank() == 0:
            tables.append(Table(workload.name, COLUMNS, rows))
            print(f"\n{tables[-1]}", flush=True)
            write(arguments.json, tables)
    dist.destroy_process_group()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, "bench budget")
    add_device(parser)
    add_workloads(parser, rounds=3)
    parser.add_argument("--budgets", type=int, default=10, help="from the smallest to the largest (default: 10)")
    parser.add_argument(
        "--shares", default="1.0,0.75,0.5,0.25,0.1", help="torch's activation_memory_budget; empty for none"
    )
    parser.add_argument("--state", choices=(*FORMATS, AUTO), default="fp32", help="of AdamW's moments (default: fp32)")
    parser.add_argument("--offload", choices=(*OFFLOADS, AUTO), default="none", help="of them (default: none)")
    arguments = parser.parse_args(argv)
    arguments.shares = [float(share) for share in arguments.shares.split(",") if share]
    if arguments.budgets < 2:
        parser.error(f"--budgets {arguments.budgets}: expected two or more, the smallest and the largest among them")
    return arguments


def measured(workload: Workload, arguments: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The rows of one model, one contender at a time: each has the device for itself."""
    precision = BF16 if device.type == "cuda" else None
    optimizer = replace(ADAMW, state=arguments.state, offload=arguments.offload)
    least, most = extremes(workload, precision, device, optimizer)
    for i in range(arguments.budgets):
        budget = least + (most - least) * i // (arguments.budgets - 1)

        def make(model: nn.Module, precision: Any, budget: int = budget) -> Any:
            return ours(model, precision, 3, optimizer, memory_budget=budget)

        yield _measure("fxshard", make, budget, workload, arguments, device)
    for share in arguments.shares:
        with private.activation_memory_budget(share):
            peer = lambda model, precision: fsdp2(model, precision, compiled=True)  # noqa: E731
            yield _measure(f"torch {share}", peer, None, workload, arguments, device)


def extremes(
    workload: Workload, precision: fxshard.Precision | None, device: torch.device, optimizer: fxshard.AdamW
) -> tuple[int, int]:
    """The smallest budget, and what a step takes without one."""
    with torch.device("cpu"):
        model, inputs = workload.build(torch.device("meta"))
    options: dict[str, Any] = {"world_size": dist.get_world_size(), "precision": precision, "optimizer": optimizer}
    options["hardware"] = "cpu" if device.type == "cpu" else "h200"
    try:
        fxshard.plan(model, inputs, memory_budget=1, **options)
    except fxshard.BudgetError as error:
        # A thousandth more: attention on a device saves a few bytes that a plan without one does not know.
        return error.smallest + error.smallest // 1000, fxshard.plan(model, inputs, **options).peak_bytes
    raise AssertionError("a byte is enough for a model")


def _measure(
    name: str, make: Make, budget: int | None, workload: Workload, arguments: argparse.Namespace, device: torch.device
) -> Row:
    contender = Contender(name, workload, device, device.type == "cuda", make)
    for _ in range(arguments.rounds):
        contender.measure(arguments.steps, 0)
    contender.measure_host()
    result = contender.result()
    model = contender.model
    schedule = model.schedule if isinstance(model, fxshard.ShardedModule) else None
    row: Row = {"name": name, "measured": result["peak_gib"], "step_ms": result["step_ms"]}
    row["loss"] = contender.losses[-1]
    if schedule is not None and budget is not None:
        machine = known("cpu" if device.type == "cpu" else "h200")
        simulated = schedule.simulate(machine).step_seconds
        row["state"] = str(kept_state(schedule.buckets, machine))
        row |= {"budget": budget / 2**30, "predicted": schedule.step_bytes / 2**30}
        row |= {"simulated_ms": simulated * 1e3, "recomputed": len(schedule.recomputed)}
    del contender, model, schedule
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


if __name__ == "__main__":
    main()
