"""Time training steps of fxshard and its peers on the same model, in turns, in one run.

fxshard bench train --ranks 2 --peer fsdp2,fsdp2-compile,ddp
fxshard bench train --device cuda --model 1b,hf:llama,hf:qwen3-moe --peer fsdp2-compile
fxshard bench train --ranks 4 --contenders fsdp2-tp-compile,fxshard-tp
fxshard bench train --device cuda --model my_models.py:build --peer fsdp2-compile --trace traces
torchrun --standalone --nproc-per-node 2 -m fxshard.bench.train --device cpu --model toy
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import fxshard
from fxshard._torch.progress import progress
from fxshard.bench.contenders import BF16, CONTENDERS, TENSOR_PARALLEL, Make
from fxshard.bench.harness import Column, Row, Table, add_device, listed, numbers, parser_of, write
from fxshard.bench.tensor_parallel import PARTS
from fxshard.bench.trace import STEP, Traced, analyse, read, table, waits
from fxshard.bench.workloads import SIZES, Workload, add_workloads, loss_of, of_length, workloads

HOST_STEPS, TRACED_STEPS = 3, 2
FIRST_STEPS = 4
"""Steps that warm up; their losses are shown."""
COLUMNS = (
    Column("step_ms", "step ms", ratio=True, bars="time of a step", unit="ms"),
    Column("first_step_s", "first s", bars="time to the first step, compiling included", unit="s"),
    Column("next_steps_s", "next 3 s"),
    Column("peak_gib", "peak GiB", ".2f", bars="peak memory", unit="GiB"),
    Column("host_ms", "launch ms", bars="the host, launching a step on an idle device", unit="ms"),
    Column("host_share", "of a step", ".0%"),
    Column("cpu_ms", "CPU ms"),
    Column("cpu_share", "of a step", ".0%"),
    *(Column(f"loss_{i}", f"loss {i + 1}", ".5f") for i in range(FIRST_STEPS)),
)


class Contender:
    """A model under training, and the times of its steps."""

    def __init__(
        self,
        name: str,
        workload: Workload,
        device: torch.device,
        bf16: bool,
        make: Make | None = None,
        micro_batches: int = 1,
        lengths: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.micro_batches = micro_batches
        self.workload = replace(workload, sharing=PARTS) if name in TENSOR_PARALLEL else workload
        self.device = device
        before = allocated()
        plain, inputs = self.workload.build(device)
        self.lengths = max(1, len(lengths))
        self.batches = itertools.cycle([of_length(inputs, length) for length in lengths] or [inputs])
        self.model, self.optimizer = (make or CONTENDERS[name])(plain, BF16 if bf16 else None)
        del plain
        self.first_step_s = self._timed(1)
        start = time.perf_counter()
        self.losses = [float(self.loss), *(float(self.step()) for _ in range(FIRST_STEPS - 1))]
        self.next_steps_s = time.perf_counter() - start
        self.rounds: list[float] = []
        self.host: list[tuple[float, float]] = []
        self.traced: Traced | None = None
        self._settle()
        self.resident = allocated() - before
        self.peak = 0

    def step(self) -> torch.Tensor:
        for _ in range(self.micro_batches):
            loss = loss_of(self.model, next(self.batches))
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def measure(self, steps: int, others_resident: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps *= self.lengths
        self.rounds.append(self._timed(steps) / steps)
        if self.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others_resident + self._captured())

    def measure_host(self) -> None:
        """Single steps, each from an idle device, whose queue cannot be full then: the host waits for nothing."""
        for _ in range(HOST_STEPS):
            self._settle()
            start, cpu = time.perf_counter(), time.process_time()
            self.loss = self.step()
            self.host.append((time.perf_counter() - start, time.process_time() - cpu))
        self._settle()

    def record(self, folder: Path) -> None:
        """Write a Chrome trace of two steps, and read it."""
        model = re.sub(r"[^\w.-]+", "-", self.workload.name).strip("-")
        path = folder / model / f"{self.name}-rank{dist.get_rank()}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        cuda = self.device.type == "cuda"
        with profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),  # the first step pays for setting up
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler:
            self.step()
            self._settle()
            profiler.step()
            for _ in range(TRACED_STEPS):
                with record_function(STEP):
                    self.loss = self.step()
            if cuda:
                torch.cuda.synchronize()
            profiler.step()
        self._settle()
        self.traced = analyse(read(path))

    def result(self) -> Row:
        """The figures. *launch*: wall time until one step is launched on an idle device (on a CPU: until it is
        done); *CPU*: that of the process meanwhile, of all its threads."""
        step, (host, cpu) = statistics.median(self.rounds), map(statistics.median, zip(*self.host, strict=True))
        return {
            "name": self.name,
            "step_ms": step * 1e3,
            "first_step_s": self.first_step_s,
            "next_steps_s": self.next_steps_s,
            "peak_gib": self.peak / 2**30,
            "host_ms": host * 1e3,
            "host_share": host / step,
            "cpu_ms": cpu * 1e3,
            "cpu_share": cpu / step,
            **{f"loss_{i}": loss for i, loss in enumerate(self.losses)},
        }

    def _timed(self, steps: int) -> float:
        self._settle()
        start = time.perf_counter()
        for _ in range(steps):
            self.loss = self.step()
        self._settle()
        return time.perf_counter() - start

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _captured(self) -> int:
        """Memory that captured programs use and the allocator counts as free."""
        captures = self.model.report.cuda_graphs if isinstance(self.model, fxshard.ShardedModule) else None
        return captures.idle_bytes if captures is not None else 0


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0


def join_ranks(kind: str) -> torch.device:
    """Become one of the ranks that torchrun started; returns its device. Ranks share GPUs where there are fewer."""
    if kind == "cpu":
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl", device_id=device)
    return device


def main() -> None:
    arguments = parse()
    device = join_ranks(arguments.device)
    tables: list[Table] = []
    for workload in workloads(arguments):
        contenders = measured(workload, arguments, device)
        torch.compiler.reset()  # a model is compiled as it would be alone
        if dist.get_rank() == 0:
            tables += report(contenders, arguments.trace)
            write(arguments.json, tables)
        del contenders
    dist.destroy_process_group()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, "bench train")
    known, usual = listed(CONTENDERS), "fsdp2,fsdp2-compile,fxshard"
    parser.add_argument("--contenders", type=known, default=usual, help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--peer", type=known, metavar="NAME,...", help="these and fxshard, in place of --contenders")
    add_device(parser)
    add_workloads(parser, rounds=5)
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches in a step (default: 1)")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="profile two steps of each, write traces there")
    cut = "cut the batch to each of these lengths in turn"
    parser.add_argument("--lengths", type=numbers, default=[], metavar="N,...", help=cut)
    arguments = parser.parse_args(argv)
    if arguments.peer:
        arguments.contenders = [*arguments.peer, "fxshard"]
    graphs = [name for name in arguments.contenders if name.endswith("-graphs")]
    if graphs and arguments.device != "cuda":
        parser.error(f"{graphs[0]} captures what a CUDA device does: --device cuda")
    experts = any(SIZES[name].config.experts for name in arguments.model or () if name in SIZES)
    if "ddp" in arguments.contenders and arguments.device == "cuda" and experts:
        parser.error("ddp computes under autocast, where torch's grouped product gets fp32: no contender for experts")
    return arguments


def measured(workload: Workload, arguments: argparse.Namespace, device: torch.device) -> list[Contender]:
    """All contenders on one model, compiled, timed in turns, and traced if that is wanted."""
    held = allocated()
    contenders: list[Contender] = []
    stages = len(arguments.contenders) + 2 * arguments.rounds + (arguments.trace is not None)
    with progress(stages, shown=dist.get_rank() == 0, lines=True) as begin:
        for name in arguments.contenders:
            begin(f"{workload.name}: compiling {name}")
            bf16 = device.type == "cuda"
            given = {"micro_batches": arguments.accumulate, "lengths": arguments.lengths}
            contenders.append(Contender(name, workload, device, bf16, **given))
        for number in range(arguments.rounds):
            begin(f"{workload.name}: round {number + 1} of {arguments.rounds}")
            for contender in contenders:
                others = held + sum(other.resident for other in contenders if other is not contender)
                contender.measure(arguments.steps, others)
        for number in range(arguments.rounds):
            begin(f"{workload.name}: host time, round {number + 1} of {arguments.rounds}")
            for contender in contenders:
                contender.measure_host()
        if arguments.trace is not None:
            begin(f"{workload.name}: tracing")
            for contender in contenders:
                contender.record(arguments.trace)
    return contenders


def report(contenders: list[Contender], traces: Path | None) -> list[Table]:
    """One model, printed. Ratios are to FSDP2 with each block compiled, where it is a contender."""
    names, model = [contender.name for contender in contenders], contenders[0].workload.name
    base = next((name for name in names if name in ("fsdp2-compile", "fsdp2-tp-compile")), names[0])
    tables = [Table(model, COLUMNS, [contender.result() for contender in contenders], base)]
    print(f"\n{tables[0]}", flush=True)
    if traces is not None:
        traced = {contender.name: contender.traced for contender in contenders}
        tables.append(table(model, traced))
        print("\n".join(["", str(tables[1]), *waits(traced), f"traces: {traces}"]), flush=True)
    return tables


if __name__ == "__main__":
    main()
