"""``fxshard search``: which mesh and which ZeRO stage is fastest, by simulation, of those that fit the memory."""

from __future__ import annotations

import argparse
import os
from multiprocessing import forkserver

from fxshard._torch.progress import progress
from fxshard.bench.target import UsageError, usage_errors

EXAMPLES = """examples:
  fxshard search llama-70b --world-size 1024
  fxshard search my_model.py:build --world-size 64 --tp 1,2,4 --hardware h100
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    search = commands.add_parser(
        "search",
        help="find the fastest mesh and ZeRO stage that fit the memory, by simulation",
        description="Simulate a training step for each mesh (data and tensor parallel, replicas) and each ZeRO stage, "
        "and print those that fit the memory, the fastest first. The global batch is the same for all: that of the "
        "example inputs on every rank.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    search.add_argument(
        "target", metavar="MODEL", help="as for inspect; with --tp, a module with parallelize(model, mesh)"
    )
    search.add_argument("--world-size", type=int, required=True, metavar="N", help="all ranks")
    search.add_argument("--hardware", default="h200", metavar="NAME", help="as for inspect (default: h200)")
    search.add_argument(
        "--tp",
        metavar="N,...",
        help="tensor-parallel ranks to try (default: those of 1,2,4,8 that divide --world-size)",
    )
    search.add_argument("--zero", default="1,2,3", metavar="N,...", help="ZeRO stages to try (default: 1,2,3)")
    search.add_argument("--layers", type=int, metavar="N", help="another number of layers than the model's own")
    search.set_defaults(command=_search)


def _search(arguments: argparse.Namespace) -> int:
    if arguments.tp is None:
        tensor = tuple(ranks for ranks in (1, 2, 4, 8) if arguments.world_size % ranks == 0)
    else:
        tensor = _numbers("--tp", arguments.tp)
    stages = _numbers("--zero", arguments.zero)
    if any(ranks < 1 or arguments.world_size % ranks for ranks in tensor):
        raise UsageError(f"--tp {arguments.tp}: each must divide --world-size {arguments.world_size}")
    if not set(stages) <= {0, 1, 2, 3}:
        raise UsageError(f"--zero {arguments.zero}: there are stages 0 to 3")
    with progress(2 + len(tensor)) as report:
        report("importing torch")
        # Where the processes of the search come from: it imports torch once for all of them, and meanwhile.
        forkserver.set_forkserver_preload(["fxshard.bench.search"])
        forkserver.ensure_running()
        from fxshard.bench.search import Search, table
        from fxshard.bench.target import load, parallelizing
        from fxshard.planner.hardware import hardware

        with usage_errors():
            machine = hardware(arguments.hardware)
        model, inputs = load(arguments.target, arguments.layers)
        if max(tensor) > 1:  # before a minute is spent on the others
            parallelizing(arguments.target, model)
        wanted = Search(arguments.target, arguments.world_size, machine, arguments.layers, stages)
        report(f"capturing {arguments.target}")
        processes = min(len(tensor), (os.cpu_count() or 1) + 1)  # one more: no core idles while the last sizes run
        found = wanted.run(tensor, processes, report)
    first = next(iter(inputs.values() if isinstance(inputs, dict) else inputs), None)
    tokens = arguments.world_size * (first.numel() if first is not None else 1)
    print(table(found, tokens))
    return 0


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{option} {text!r}: expected numbers such as 1,2,4") from None
