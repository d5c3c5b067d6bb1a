"""Time training steps of fxshard and its peers on the same model, in turns, in one run.

fxshard bench train --ranks 2 --peer fsdp2,fsdp2-compile,ddp
fxshard bench train --device cuda --size 1b --peer fsdp2-compile
fxshard bench train --device cuda --size moe-1b --peer fsdp2-compile --trace traces
torchrun --standalone --nproc-per-node 2 -m fxshard.bench.train --device cpu --size toy
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import fxshard
from fxshard._torch.progress import progress
from fxshard.bench import names
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.bench.trace import STEP, Traced, analyse, read, table

SIZES = {
    "toy": (LlamaConfig(vocab=1000, dim=256, layers=8, heads=4, hidden=704), 4, 128),
    "1b": (LlamaConfig(), 4, 4096),
    "moe-toy": (LlamaConfig(vocab=1000, dim=128, layers=4, heads=4, hidden=96, experts=16), 4, 128),
    "moe-1b": (LlamaConfig(dim=1536, layers=12, heads=12, hidden=896, experts=16), 4, 4096),
}
HOST_STEPS, TRACED_STEPS = 3, 2
BF16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)
ADAMW = fxshard.AdamW(lr=1e-4)
MUON = fxshard.Muon(lr=1e-3, adamw=ADAMW)


@dataclass
class Result:
    """What was measured of one contender."""

    name: str
    step_ms: float
    first_step_s: float
    peak_gib: float
    loss: float
    host_ms: float
    """Wall time until one step is launched on an idle device (on a CPU: until it is done)."""
    cpu_ms: float
    """CPU time of the process meanwhile, of all its threads."""
    trace: Traced | None = None


def fsdp2(
    model: nn.Module, precision: fxshard.Precision | None, compiled: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = (
        MixedPrecisionPolicy(precision.param, precision.reduce) if precision is not None else MixedPrecisionPolicy()
    )
    layers = model.get_submodule("layers")
    for layer in layers.children():
        if compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def ours(
    model: nn.Module,
    precision: fxshard.Precision | None,
    zero: int,
    optimizer: fxshard.AdamW | fxshard.Muon = ADAMW,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    sharded = fxshard.compile(model, zero=zero, precision=precision, optimizer=optimizer, **options)
    return sharded, sharded.optimizer


class Autocast(nn.Module):
    """A module whose forward runs under autocast."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.dtype = dtype

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, self.dtype):
            return self.inner(tokens, targets)


def ddp(model: nn.Module, precision: fxshard.Precision | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """DistributedDataParallel around the compiled model; in mixed precision autocast over fp32 parameters."""
    from torch.nn.parallel import DistributedDataParallel

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.compile()
    parallel: nn.Module = DistributedDataParallel(model)
    if precision is not None and precision.param is not None:
        parallel = Autocast(parallel, precision.param)
    return parallel, optimizer


def unsharded(model: nn.Module, precision: fxshard.Precision | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The whole model under ``torch.compile`` in the compute dtype, nothing sharded, no masters: a lower bound."""
    if precision is not None and precision.param is not None:
        model = model.to(precision.param)
    return torch.compile(model), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # type: ignore[return-value]


CONTENDERS: dict[str, Callable[..., tuple[nn.Module, torch.optim.Optimizer]]] = {
    "fxshard": lambda model, precision: ours(model, precision, 3),
    "fxshard-graphs": lambda model, precision: ours(model, precision, 3, cuda_graphs=True),
    "fxshard-unfused": lambda model, precision: ours(model, precision, 3, experts="off"),
    "fxshard-muon": lambda model, precision: ours(model, precision, 3, MUON),
    "fxshard-muon-zero1": lambda model, precision: ours(model, precision, 1, MUON),
    "fxshard-zero2": lambda model, precision: ours(model, precision, 2),
    "fxshard-zero1": lambda model, precision: ours(model, precision, 1),
    "fxshard-zero0": lambda model, precision: ours(model, precision, 0),
    "fsdp2": lambda model, precision: fsdp2(model, precision, compiled=False),
    "fsdp2-compile": lambda model, precision: fsdp2(model, precision, compiled=True),
    "ddp": ddp,
    "compile": unsharded,
}


class Contender:
    """A model under training, and the times of its steps."""

    def __init__(
        self, name: str, config: LlamaConfig, batch: int, length: int, device: torch.device, bf16: bool
    ) -> None:
        self.name = name
        self.device = device
        before = self._allocated()
        torch.manual_seed(0)
        with device:
            plain = Llama(config)
        self.model, self.optimizer = CONTENDERS[name](plain, BF16 if bf16 else None)
        del plain
        torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
        self.tokens = torch.randint(0, config.vocab, (batch, length), device=device)
        self.targets = torch.randint(0, config.vocab, (batch, length), device=device)
        self.first_step_s = self._timed(1)
        for _ in range(3):
            self.loss = self.step()
        self.rounds: list[float] = []
        self.host: list[tuple[float, float]] = []
        self.traced: Traced | None = None
        self._settle()
        self.resident = self._allocated() - before
        self.peak = 0

    def step(self) -> torch.Tensor:
        loss = self.model(self.tokens, self.targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def measure(self, steps: int, others_resident: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
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
        path = folder / f"{self.name}-rank{dist.get_rank()}.json.gz"
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

    def result(self) -> Result:
        return Result(
            self.name,
            statistics.median(self.rounds) * 1e3,
            self.first_step_s,
            self.peak / 2**30,
            float(self.loss),
            statistics.median(wall for wall, _ in self.host) * 1e3,
            statistics.median(cpu for _, cpu in self.host) * 1e3,
            self.traced,
        )

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

    def _allocated(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0


def main() -> None:
    arguments = _parse()
    cuda = arguments.device == "cuda"
    # Ranks share a GPU where there are fewer of them.
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    if not cuda:
        torch.set_num_threads(1)
    contenders = measured(arguments, device)
    if dist.get_rank() == 0:
        report([contender.result() for contender in contenders], arguments)
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--contenders", default="fsdp2,fsdp2-compile,fxshard", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--peer", metavar="NAME,...", help="these beside fxshard, in place of --contenders")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=names.DEVICES, default=best, help=f"(default here: {best})")
    parser.add_argument("--size", choices=SIZES, help="(default: 1b on CUDA, toy on a CPU)")
    parser.add_argument("--batch", type=int, help="sequences per rank")
    parser.add_argument("--layers", type=int, help="another number of layers than the size has")
    parser.add_argument("--steps", type=int, default=5, help="steps per round (default: 5)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, the contenders taking turns (default: 5)")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="profile two steps of each, write traces there")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    if arguments.peer:
        arguments.contenders = f"{arguments.peer},fxshard"
    arguments.contenders = arguments.contenders.split(",")
    arguments.size = arguments.size or ("1b" if arguments.device == "cuda" else "toy")
    unknown = [name for name in arguments.contenders if name not in CONTENDERS]
    if unknown:
        parser.error(f"unknown contender {unknown[0]!r}; known are {', '.join(CONTENDERS)}")
    if "fxshard-graphs" in arguments.contenders and arguments.device != "cuda":
        parser.error("fxshard-graphs captures what a CUDA device does: --device cuda")
    if "ddp" in arguments.contenders and arguments.device == "cuda" and SIZES[arguments.size][0].experts:
        parser.error("ddp computes under autocast, where torch's grouped product gets fp32: no contender for experts")
    return arguments


def measured(arguments: argparse.Namespace, device: torch.device) -> list[Contender]:
    """All contenders, compiled, timed in turns, and traced if that is wanted."""
    config, batch, length = SIZES[arguments.size]
    if arguments.layers:
        config = replace(config, layers=arguments.layers)
    if arguments.trace is not None:
        arguments.trace.mkdir(parents=True, exist_ok=True)
    contenders: list[Contender] = []
    stages = len(arguments.contenders) + 2 * arguments.rounds + (arguments.trace is not None)
    with progress(stages, shown=dist.get_rank() == 0) as begin:
        for name in arguments.contenders:
            begin(f"compiling {name}")
            made = Contender(name, config, arguments.batch or batch, length, device, bf16=device.type == "cuda")
            contenders.append(made)
        for number in range(arguments.rounds):
            begin(f"round {number + 1} of {arguments.rounds}")
            for contender in contenders:
                others = sum(other.resident for other in contenders if other is not contender)
                contender.measure(arguments.steps, others)
        for number in range(arguments.rounds):
            begin(f"host time, round {number + 1} of {arguments.rounds}")
            for contender in contenders:
                contender.measure_host()
        if arguments.trace is not None:
            begin("tracing")
            for contender in contenders:
                contender.record(arguments.trace)
    return contenders


def report(results: list[Result], arguments: argparse.Namespace) -> None:
    """Host times with their share of a step."""
    base = next((r for r in results if r.name == "fsdp2-compile"), results[0])
    print(
        f"{'contender':<20}{'step ms':>10}{'ratio':>8}{'first s':>9}{'peak GiB':>10}{'launch ms':>17}{'CPU ms':>17}"
        f"{'loss':>9}   base: {base.name}"
    )
    for r in results:
        host = (f"{ms:.1f} ({ms / r.step_ms:.0%})" for ms in (r.host_ms, r.cpu_ms))
        print(
            f"{r.name:<20}{r.step_ms:>10.1f}{r.step_ms / base.step_ms:>8.3f}{r.first_step_s:>9.1f}{r.peak_gib:>10.2f}"
            + "".join(f"{cell:>17}" for cell in host)
            + f"{r.loss:>9.4f}",
            flush=True,
        )
    if arguments.trace is not None:
        print(f"\n{table({r.name: r.trace for r in results})}\ntraces: {arguments.trace}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(r) for r in results], indent=1))


if __name__ == "__main__":
    main()
