"""The simulator against reality: predicted and measured steps of one model on the ranks at hand.

torchrun --standalone --nproc-per-node 1 -m fxshard.bench.prediction --device cuda --model 1b

Two predictions, for ranks that have a device each: from the preset as it is, and with every duration recorded by
``model.profile``.
"""

from __future__ import annotations

import argparse
import statistics

import torch.distributed as dist

import fxshard
from fxshard.bench.harness import Column, Table, add_device, parser_of, write
from fxshard.bench.train import Contender, join_ranks
from fxshard.bench.workloads import SIZES, Workload
from fxshard.planner.hardware import hardware

ROUNDS = 5
"""Rounds of five steps each."""
RESCHEDULED = "measured, rescheduled by its own profile"
COLUMNS = (
    Column("step_ms", "step ms", ratio=True),
    Column("compute_ms", "compute ms"),
    Column("communication_ms", "communication ms"),
    Column("exposed_ms", "exposed ms"),
)


def main() -> None:
    parser = parser_of(__doc__)
    add_device(parser)
    parser.add_argument("--model", choices=SIZES, default="toy")
    parser.add_argument("--batch", type=int, help="sequences per rank")
    arguments = parser.parse_args()
    device = join_ranks(arguments.device)
    contender = Contender("fxshard", Workload(arguments.model, batch=arguments.batch), device, device.type == "cuda")
    model = contender.model
    assert isinstance(model, fxshard.ShardedModule)
    for _ in range(ROUNDS):
        contender.measure(5, 0)
    with model.profile(steps=5) as profile:
        for _ in range(5):
            contender.step()
    before = statistics.median(contender.rounds)
    model.reschedule(profile)
    contender.step()
    contender.rounds.clear()
    for _ in range(ROUNDS):
        contender.measure(5, 0)
    if dist.get_rank() == 0:
        report(model.schedule, profile, before, statistics.median(contender.rounds), arguments)
    dist.destroy_process_group()


def report(
    schedule: fxshard.Schedule, profile: fxshard.Profile, before: float, after: float, arguments: argparse.Namespace
) -> None:
    machine = hardware("h200" if arguments.device == "cuda" else "cpu")
    recorded = schedule.simulate(machine, durations=profile)
    predictions = {"preset": schedule.simulate(machine), "recorded durations": recorded}
    rows = [{"name": "measured", "step_ms": before * 1e3}, {"name": RESCHEDULED, "step_ms": after * 1e3}]
    for name, found in predictions.items():
        parts = ("step", "compute", "communication", "exposed")
        rows.append({"name": name, **{f"{part}_ms": getattr(found, f"{part}_seconds") * 1e3 for part in parts}})
    table = Table("", COLUMNS, rows, RESCHEDULED)
    print(table)
    write(arguments.json, [table])


if __name__ == "__main__":
    main()
