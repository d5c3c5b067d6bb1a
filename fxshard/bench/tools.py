"""Steps of ``transformers.Trainer`` and of a LoRA fine-tune, with fxshard and with FSDP2, each in a process of its own.

fxshard bench tools --device cuda --contenders loop,trainer,trainer-fsdp2 --rounds 2 --steps 20
fxshard bench tools --device cuda --contenders lora,lora-fsdp2 --steps 10
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fxshard
from fxshard.bench.arguments import DEVICES, listed
from fxshard.bench.contenders import ADAMW, BF16, fsdp2
from fxshard.bench.models import LlamaConfig
from fxshard.bench.variants import LLAMA_8B
from fxshard.bench.workloads import SIZES, Workload, loss_of

WARM = 4
"""Steps before the clock starts."""
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Step = Callable[[], torch.Tensor]


def measure(step: Step, device: str, steps: int) -> dict[str, float]:
    """Milliseconds of a step, after a few that compile and warm up, and what the device held at most."""
    for _ in range(WARM):
        loss = step()
    _wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    _wait(device)
    return {"step_ms": (time.perf_counter() - start) * 1e3 / steps, "loss": float(loss), "peak_gib": _peak(device)}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def loop(device: str, steps: int, clip: float = 1.0) -> dict[str, float]:
    """The bare loop: what a Trainer does in a step, and nothing around it."""
    model, inputs = Workload(_llama(device), cache=False).build(torch.device(device))
    sharded = fxshard.compile(model, precision=_precision(device), optimizer=ADAMW)

    def step() -> torch.Tensor:
        loss = loss_of(sharded, inputs)
        loss.backward()
        sharded.clip_grad_norm_(clip)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        return loss.detach()

    return measure(step, device, steps)


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
                _wait(device)
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


def _precision(device: str) -> fxshard.Precision | None:
    return BF16 if device == "cuda" else None


def _llama(device: str) -> str:
    return "hf:llama" if device == "cuda" else "hf:llama-toy"


def lora(device: str, steps: int, *, peer: bool = False) -> dict[str, float]:
    """LoRA of rank 16 on all linears of a Llama of 8B in bf16, two sequences of 4096 tokens."""
    model, inputs = _adapted(device)
    if peer:
        wrapped, optimizer = fsdp2(model, _precision(device), compiled=True)
    else:
        wrapped = sharded = fxshard.compile(model, precision=_precision(device), optimizer=ADAMW, return_logits=False)
        optimizer = sharded.optimizer

    def step() -> torch.Tensor:
        loss = loss_of(wrapped, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return measure(step, device, steps)


def _adapted(device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers import LlamaConfig as Config

    toy: LlamaConfig = SIZES["toy"].config
    small = {"vocab_size": toy.vocab, "hidden_size": toy.dim, "intermediate_size": toy.hidden}
    shapes = LLAMA_8B if device == "cuda" else {**small, "num_hidden_layers": 2, "num_attention_heads": toy.heads}
    length = 4096 if device == "cuda" else 64
    torch.manual_seed(0)
    with torch.device(device):
        config = Config(**shapes, use_cache=False, max_position_embeddings=length)  # type: ignore[arg-type]
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
        adapters = LoraConfig(r=16, lora_alpha=32, target_modules=ADAPTED, task_type="CAUSAL_LM")
        adapted = get_peft_model(model, adapters)
        tokens = torch.randint(0, config.vocab_size, (2, length))
    return adapted.train(), {"input_ids": tokens, "labels": tokens}


CONTENDERS: dict[str, Callable[[str, int], dict[str, float]]] = {
    "loop": loop,
    "trainer": trainer,
    "trainer-fsdp2": trainer_fsdp2,
    "lora": lora,
    "lora-fsdp2": lambda device, steps: lora(device, steps, peer=True),
}
GPU_ONLY = {"trainer-fsdp2"}


def run_alone(name: str, device: str, steps: int) -> dict[str, float]:
    """In a fresh process, as the only rank of a group."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["-m", "fxshard.bench.tools", "--alone", name, "--device", device, "--steps", str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=DEVICES, default=best, help=f"small models on a CPU (default here: {best})")
    parser.add_argument("--contenders", type=listed(tuple(CONTENDERS)), metavar="NAME,...", help=", ".join(CONTENDERS))
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: 10)")
    parser.add_argument("--rounds", type=int, default=1, help="times that each contender runs, in turns (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
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
    figures = compare(names, arguments.device, arguments.steps, arguments.rounds)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


def compare(
    names: list[str], device: str, steps: int, rounds: int, run: Callable[[str, str, int], dict[str, float]] = run_alone
) -> dict[str, dict[str, float]]:
    """The contenders in turns; of each, the round with the median step."""
    print(f"{'':<16}{'step ms':>9}{'steps/s':>9}{'ratio':>8}{'peak GiB':>10}{'loss':>9}  base: {names[0]}")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names:
            found[name].append(run(name, device, steps))
            _show(name, found[name][-1], found[names[0]][-1])
        print(f"round {turn + 1} of {rounds}", flush=True)
    figures = {name: sorted(turns, key=lambda one: one["step_ms"])[len(turns) // 2] for name, turns in found.items()}
    if rounds > 1:
        print("medians")
        for name in names:
            _show(name, figures[name], figures[names[0]])
    return figures


def _show(name: str, one: dict[str, float], base: dict[str, float]) -> None:
    took = one["step_ms"]
    print(
        f"{name:<16}{took:>9.1f}{1e3 / took:>9.3f}{took / base['step_ms']:>8.3f}{one['peak_gib']:>10.2f}"
        f"{one['loss']:>9.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
