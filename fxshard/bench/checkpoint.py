"""Save and load a model with its AdamW state: fxshard against FSDP2 with plain ``torch.distributed.checkpoint``.

    fxshard bench checkpoint --layers 2 --rounds 3 --svg checkpoint.svg
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m fxshard.bench.checkpoint

Contenders take turns in one run, each saving, loading and deleting its own checkpoint. Times are between barriers.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fxshard
from fxshard._torch.progress import progress
from fxshard.bench.contenders import fsdp2
from fxshard.bench.harness import Column, Row, Table, listed, parser_of, write
from fxshard.bench.models import Llama, LlamaConfig

SIZES = {"small": LlamaConfig(vocab=8192, dim=768, layers=8, heads=12, hidden=2048), "1b": LlamaConfig()}


class Fsdp2:
    """``fully_shard`` on every layer, state dicts by torch, default planner, writer and reader."""

    name = "FSDP2 + DCP"

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = fsdp2(model, None, compiled=False)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Ours:
    name = "fxshard"

    def __init__(self, model: nn.Module) -> None:
        self.model = fxshard.shard(model, zero=3, optimizer=fxshard.AdamW(lr=1e-4))

    def save(self, path: Path) -> None:
        fxshard.save(self.model, path)

    def load(self, path: Path) -> None:
        fxshard.load(self.model, path)


class OursAsynchronous(Ours):
    """The time until training goes on; the writing itself is waited for outside."""

    name = "fxshard, asynchronous"

    def save(self, path: Path) -> None:
        self.pending = fxshard.save(self.model, path, asynchronous=True)

    def finish(self) -> None:
        self.pending.wait()


COLUMNS = (
    Column("save_s", "save s", ".2f", bars="saving, until training goes on", unit="s"),
    Column("written_after_s", "done s", ".2f", ratio=True, bars="saving, until it is written", unit="s"),
    Column("save_speed", "GB/s", ".2f"),
    Column("load_s", "load s", ".2f", ratio=True, bars="loading", unit="s"),
    Column("load_speed", "GB/s", ".2f"),
    Column("save_peak", "save +MiB", ".0f"),
    Column("load_peak", "load +MiB", ".0f"),
)
CONTENDERS: dict[str, type[Fsdp2] | type[Ours]] = {"fsdp2": Fsdp2, "fxshard": Ours, "asynchronous": OursAsynchronous}


def timed(action: Callable[[], None]) -> tuple[float, int]:
    """(seconds between barriers, bytes by which this process grew at its largest)"""
    before = _reset_peak()
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start, _status("VmHWM") - before


def _reset_peak() -> int:
    """Forget the largest size so far; returns the present one."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def round_trip(contender: Fsdp2 | Ours, folder: Path) -> dict[str, float]:
    path = folder / contender.name.replace(" ", "-")
    save_s, save_peak = timed(lambda: contender.save(path))
    finish_s = 0.0
    if isinstance(contender, OursAsynchronous):
        finish_s, _ = timed(contender.finish)
    load_s, load_peak = timed(lambda: contender.load(path))
    size = sum(file.stat().st_size for file in path.iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    return {
        "save_s": save_s,
        "written_after_s": save_s + finish_s,
        "load_s": load_s,
        "bytes": size,
        "save_speed": size / (save_s + finish_s) / 1e9,
        "load_speed": size / load_s / 1e9,
        "save_peak": save_peak / 2**20,
        "load_peak": load_peak / 2**20,
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, "bench checkpoint")
    every = ",".join(CONTENDERS)
    parser.add_argument("--contenders", type=listed(CONTENDERS), default=every, help=f"(default: {every})")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--layers", type=int, help="another number of layers than the size has")
    parser.add_argument("--rounds", type=int, default=5, help="the first one is not timed")
    parser.add_argument("--one-at-a-time", action="store_true", help="of the contenders, where memory is short")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary folder)")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    names = arguments.contenders
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = SIZES[arguments.size]
    config = replace(config, layers=arguments.layers or config.layers)
    made = [tempfile.mkdtemp(dir=arguments.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    folder = Path(str(made[0]))
    alive: dict[str, Fsdp2 | Ours] = {}
    found: dict[str, list[dict[str, float]]] = {CONTENDERS[name].name: [] for name in names}
    turns = [(number, name) for number in range(arguments.rounds) for name in names]
    with progress(len(turns), shown=dist.get_rank() == 0) as begin:
        for number, name in turns:
            begin(f"round {number + 1} of {arguments.rounds}: {CONTENDERS[name].name}")
            if arguments.one_at_a_time and name not in alive:
                alive.clear()
                gc.collect()
            if name not in alive:
                torch.manual_seed(0)
                alive[name] = CONTENDERS[name](Llama(config))
            found[alive[name].name].append(round_trip(alive[name], folder))
    if dist.get_rank() == 0:
        folder.rmdir()
        table = medians(found)
        print(table, flush=True)
        write(arguments.json, [table])
    dist.destroy_process_group()


def medians(found: dict[str, list[dict[str, float]]]) -> Table:
    """Medians of times without the first round, which warms up, and the largest of the peaks of all rounds."""
    rows: list[Row] = [
        {
            "name": name,
            **{
                key: max(one[key] for one in rounds)
                if key.endswith("peak")
                else statistics.median(one[key] for one in rounds[1:] or rounds)
                for key in rounds[0]
            },
        }
        for name, rounds in found.items()
    ]
    return Table(f"{rows[0]['bytes'] / 1e9:.2f} GB", COLUMNS, rows, rows[0]["name"])


if __name__ == "__main__":
    main()
