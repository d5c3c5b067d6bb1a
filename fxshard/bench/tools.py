"""Steps of ``transformers.Trainer`` with fxshard and with FSDP2, and of the bare loop, each in a process of its own.

fxshard bench tools --device cuda --contenders loop,trainer,trainer-fsdp2 --rounds 2 --steps 20
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import fxshard
from fxshard._torch.progress import progress
from fxshard.bench.clock import synchronize
from fxshard.bench.contenders import ADAMW, BF16
from fxshard.bench.harness import Column, Row, Table, add_device, in_fresh_process, listed, parser_of, write
from fxshard.bench.workloads import Workload, loss_of

WARM = 4
"""Steps before the clock starts."""
COLUMNS = (
    Column("step_ms", "step ms", ratio=True, bars="time of a step", unit="ms"),
    Column("peak_gib", "peak GiB", ".2f", bars="peak memory", unit="GiB"),
    Column("loss", "loss", ".4f"),
)


def _peak(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def loop(device: str, steps: int) -> dict[str, float]:
    """The bare loop: what a Trainer does in a step, and nothing around it."""
    model, inputs = Workload(_llama(device), cache=False).build(torch.device(device))
    sharded = fxshard.compile(model, precision=BF16 if device == "cuda" else None, optimizer=ADAMW)
    for number in range(WARM + steps):
        if number == WARM:
            synchronize(device)
            start = time.perf_counter()
        loss = loss_of(sharded, inputs)
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    synchronize(device)
    taken = (time.perf_counter() - start) * 1e3 / steps
    return {"step_ms": taken, "loss": float(loss.detach()), "peak_gib": _peak(device)}


def trainer(device: str, steps: int, **arguments: Any) -> dict[str, float]:
    """``Trainer.train()`` with defaults: clipping, a schedule of learning rates, the loss summed up for logs."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from fxshard.integrations.transformers import sharded

    model, inputs = Workload(_llama(device), cache=False).build(torch.device("cpu" if arguments else device))
    assert isinstance(inputs, dict)
    rows = [{name: value[i].cpu() for name, value in inputs.items()} for i in range(len(inputs["input_ids"]))]
    found: dict[str, float] = {}

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (WARM, WARM + steps):
                synchronize(device)
                found[str(state.global_step)] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=WARM + steps, per_device_train_batch_size=len(rows), bf16=device == "cuda", report_to=[],
            save_strategy="no", logging_steps=WARM + steps, disable_tqdm=True, use_cpu=device == "cpu", **arguments,
        )  # fmt: skip
        kind = Trainer if arguments else sharded(Trainer, zero=3)
        trains = kind(model=model, args=settings, train_dataset=rows * (WARM + steps), callbacks=[Clock()])
        result = trains.train()
        if arguments and not any(isinstance(part, FSDPModule) for part in trains.model_wrapped.modules()):
            raise RuntimeError(f"this Trainer trained a {type(trains.model_wrapped).__name__}, and not with FSDP2")
    taken = (found[str(WARM + steps)] - found[str(WARM)]) * 1e3 / steps
    return {"step_ms": taken, "loss": float(result.training_loss), "peak_gib": _peak(device)}


def trainer_fsdp2(device: str, steps: int) -> dict[str, float]:
    """The same with the Trainer's own FSDP2 and ``torch_compile``; Accelerate has no FSDP for CPUs, and takes DDP."""
    wrap = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return trainer(device, steps, fsdp=True, fsdp_config=wrap, torch_compile=True)


def _llama(device: str) -> str:
    return "hf:llama" if device == "cuda" else "hf:llama-toy"


CONTENDERS: dict[str, Callable[[str, int], dict[str, float]]] = {
    "loop": loop,
    "trainer": trainer,
    "trainer-fsdp2": trainer_fsdp2,
}
GPU_ONLY = {"trainer-fsdp2"}


def run_alone(name: str, device: str, steps: int) -> dict[str, float]:
    """In a fresh process, as the only rank of a group."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    given = ["--alone", name, "--device", device, "--steps", str(steps)]
    return in_fresh_process(*start, "-m", "fxshard.bench.tools", *given)


def main() -> None:
    parser = parser_of(__doc__)
    add_device(parser)
    parser.add_argument("--contenders", type=listed(tuple(CONTENDERS)), metavar="NAME,...", help=", ".join(CONTENDERS))
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: 10)")
    parser.add_argument("--rounds", type=int, default=1, help="times that each contender runs, in turns (default: 1)")
    parser.add_argument("--alone", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone is not None:
        if arguments.device == "cuda":
            torch.set_float32_matmul_precision("high")
        if not arguments.alone.startswith("trainer"):  # which starts its own
            dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
        found = CONTENDERS[arguments.alone](arguments.device, arguments.steps)
        print(json.dumps(found), flush=True)
        os._exit(0)  # what tools leave running does not count
    names = arguments.contenders or [name for name in CONTENDERS if arguments.device == "cuda" or name not in GPU_ONLY]
    for name in names:
        if arguments.device == "cpu" and name in GPU_ONLY:
            parser.error(f"{name} needs --device cuda: Accelerate has no FSDP for CPUs")
    table = compare(names, arguments.device, arguments.steps, arguments.rounds)
    print(table)
    write(arguments.json, [table])


def compare(
    names: list[str], device: str, steps: int, rounds: int, run: Callable[[str, str, int], dict[str, float]] = run_alone
) -> Table:
    """The contenders in turns; of each, the round with the median step."""
    found: dict[str, list[Row]] = {name: [] for name in names}
    with progress(rounds * len(names)) as begin:
        for turn in range(rounds):
            for name in names:
                begin(f"round {turn + 1} of {rounds}: {name}, in a fresh process")
                found[name].append({"name": name, **run(name, device, steps)})
    rows = [sorted(turns, key=lambda one: one["step_ms"])[len(turns) // 2] for turns in found.values()]
    return Table("", COLUMNS, rows, names[0])


if __name__ == "__main__":
    main()
