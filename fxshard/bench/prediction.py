"""The simulator against reality: predicted and measured steps of one model on the ranks at hand.

torchrun --standalone --nproc-per-node 2 -m fxshard.bench.prediction --device cpu --model toy

All ranks share one device here (CUDA_VISIBLE_DEVICES=0 where there are several). Three predictions: from the preset as
it is; with the device's arithmetic and memory divided among the ranks and the link as recorded; and with every duration
recorded by ``model.profile``. With several ranks the last two let compute and collectives take turns: both run on the
one device.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch.distributed as dist

import fxshard
from fxshard.bench.harness import Column, Table, add_device, parser_of, write
from fxshard.bench.train import Contender, join_ranks
from fxshard.bench.workloads import SIZES, Workload
from fxshard.planner.hardware import Hardware, hardware
from fxshard.schedule.events import Kind

ROUNDS = 5
"""Of five steps each."""
RESCHEDULED = "measured, rescheduled by its own profile"
COLUMNS = (
    Column("step_ms", "step ms", ratio=True),
    Column("compute_ms", "compute ms"),
    Column("communication_ms", "communication ms"),
    Column("exposed_ms", "exposed ms"),
)


def shared_device(machine: Hardware, ranks: int, link: float) -> Hardware:
    """A machine whose ranks share one device: an equal part of its arithmetic and memory for each, a link as measured.

    ``link`` is in bytes/s per rank. Collectives run on the same device: simulate without overlap.
    """
    return replace(
        machine,
        name=f"{machine.name}/{ranks}",
        flops={dtype: rate / ranks for dtype, rate in machine.flops.items()},
        memory_bandwidth=machine.memory_bandwidth / ranks,
        memory_bytes=machine.memory_bytes // ranks,
        intra_bandwidth=link,
    )


def link_of(profile: fxshard.Profile, schedule: fxshard.Schedule) -> float:
    """Bytes/s per rank over the recorded gathers and reductions together."""
    moved = seconds = 0.0
    for i, duration in profile.of(schedule).items():
        event = schedule.events[i]
        if event.kind in (Kind.UNSHARD, Kind.REDUCE):
            moved += event.bytes * (schedule.ranks - 1) / schedule.ranks
            seconds += duration
    return moved / seconds


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
    predictions = {"preset": schedule.simulate(machine)}
    if schedule.ranks > 1:
        link = link_of(profile, schedule)
        print(f"link, recorded alone: {link / 1e9:.2f} GB/s per rank")
        part = shared_device(machine, schedule.ranks, link)
        predictions["shared device, recorded link"] = schedule.simulate(part, overlap=False)
    alone = schedule.ranks == 1  # the others are on the same device
    predictions["recorded durations"] = schedule.simulate(machine, durations=profile, overlap=alone)
    rows = [{"name": "measured", "step_ms": before * 1e3}, {"name": RESCHEDULED, "step_ms": after * 1e3}]
    for name, found in predictions.items():
        parts = ("step", "compute", "communication", "exposed")
        rows.append({"name": name, **{f"{part}_ms": getattr(found, f"{part}_seconds") * 1e3 for part in parts}})
    table = Table("", COLUMNS, rows, RESCHEDULED)
    print(table)
    write(arguments.json, [table])


if __name__ == "__main__":
    main()
