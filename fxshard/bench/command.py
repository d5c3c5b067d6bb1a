"""``fxshard bench``: start a benchmark on ranks of its own, and make a picture of its figures.

Each benchmark is a module that runs by ``python -m`` (or torchrun) as well. Importing this one does not import torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fxshard.bench.harness import read, to_svg
from fxshard.bench.target import UsageError


@dataclass(frozen=True)
class Bench:
    """A benchmark: its module and what it measures."""

    module: str
    about: str
    ranks: bool = False
    """Whether it runs on several ranks."""
    gpus: bool = False
    """Whether its ranks run on GPUs where there are some, one on each."""


BENCHES = {
    "train": Bench("fxshard.bench.train", "training steps against FSDP2, DDP and torch.compile", ranks=True, gpus=True),
    "budget": Bench("fxshard.bench.budget", "steps and peaks under memory budgets", ranks=True, gpus=True),
    "optimizer": Bench("fxshard.bench.optimizer", "a Muon step against torch.optim.Muon and AdamW"),
    "quantize": Bench("fxshard.bench.quantize", "quantizing to MXFP8 against a copy and Transformer Engine"),
    "moe": Bench("fxshard.bench.moe", "a mixture of experts against eager torch and torch.compile"),
    "compile-time": Bench("fxshard.bench.compile_time", "time to the first step, by number of layers"),
    "models": Bench("fxshard.bench.coverage", "which architectures of transformers train, in how many graphs: a table"),
    "tools": Bench("fxshard.bench.tools", "transformers.Trainer against FSDP2 and the bare loop, each in a process"),
    "planning": Bench("fxshard.bench.planning", "what planning costs, and what it gains in the simulator"),
    "checkpoint": Bench("fxshard.bench.checkpoint", "saving and loading against FSDP2", ranks=True),
}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure fxshard against its peers, in one run",
        description="Measure fxshard against its peers on the same model, in turns, in one run, and print ratios.\n"
        "Runs on GPUs and, with smaller models, on a CPU. Ranks are started here; torchrun is not needed.",
        epilog="benchmarks:\n"
        + "\n".join(f"  {name:<14}{bench.about}" for name, bench in BENCHES.items())
        + "\n\nOther options are the benchmark's own: fxshard bench train --options\n\nexamples:\n"
        "  fxshard bench train --ranks 2 --peer fsdp2,fsdp2-compile,ddp --svg train.svg\n"
        "  fxshard bench train --device cpu --model toy,hf:llama-toy --rounds 2\n"
        "  fxshard bench optimizer --json optimizer.json\n"
        "  fxshard bench models --only llama,gpt2 --output models.md\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="BENCHMARK", choices=BENCHES, help=", ".join(BENCHES))
    parser.add_argument(
        "--ranks",
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="processes to start (default: one per GPU, 2 on a CPU)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the figures as a picture of bars")
    parser.add_argument("--options", action="store_true", help="show the benchmark's own options")
    parser.set_defaults(command=run, takes_rest=True)


def run(arguments: argparse.Namespace) -> int:
    bench = BENCHES[arguments.name]
    rest = list(arguments.rest)
    if arguments.options:
        return subprocess.call([sys.executable, "-m", bench.module, "--help"])
    if arguments.ranks is not None and (arguments.ranks < 1 or not bench.ranks):
        one = "it runs in one process" if not bench.ranks else "expected a number of processes, 1 or more"
        raise UsageError(f"--ranks {arguments.ranks} for bench {arguments.name}: {one}")
    if "RANK" in os.environ:
        raise UsageError(f"bench starts its own ranks; under torchrun use: torchrun ... -m {bench.module}")
    for path in (arguments.json, arguments.svg):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no directory {path.absolute().parent}")
    if arguments.svg is not None and arguments.name == "models":
        raise UsageError(f"cannot write {arguments.svg}: bench models gives a table, and no bars")
    if bench.ranks:  # here, and not on every rank: torchrun would bury the message under its own
        importlib.import_module(bench.module).parse(rest)
    with tempfile.TemporaryDirectory() as folder:
        figures = arguments.json or Path(folder, "figures.json")
        options = [*rest, "--json", str(figures)] if arguments.json or arguments.svg else rest
        code = subprocess.call(launch(bench, arguments.ranks, options), env=environment())
        if code == 0 and arguments.svg is not None:
            ranks = ["--ranks", str(arguments.ranks)] if arguments.ranks is not None else []
            _draw(figures, arguments.svg, arguments.name, " ".join([arguments.name, *ranks, *rest]))
    for path in (arguments.json, arguments.svg):
        if code == 0 and path is not None:
            print(f"wrote {path}", file=sys.stderr)
    return code


def launch(bench: Bench, ranks: int | None, rest: list[str]) -> list[str]:
    """The command that runs it."""
    if not bench.ranks:
        return [sys.executable, "-m", bench.module, *rest]
    if ranks is None:
        ranks = (_gpus() if bench.gpus and "cpu" not in rest else 0) or 2
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*start, "-m", bench.module, *rest]


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def environment() -> dict[str, str]:
    """One thread to a rank, unless told otherwise: ranks on one machine share its cores."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


def _draw(figures: Path, path: Path, name: str, called: str) -> None:
    charts = [chart for table in read(figures) for chart in table.charts()]
    if not charts:
        raise UsageError(f"{path} is not written: these parts of bench {name} give tables, and no bars")
    path.write_text(to_svg(charts, f"fxshard bench {called}"), encoding="utf-8")
