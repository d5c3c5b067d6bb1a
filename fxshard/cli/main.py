"""The ``fxshard`` command: ``demo``, ``inspect``, ``search``, ``doctor`` and ``bench``.

Nothing here imports torch before it is needed: ``fxshard --help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from fxshard._torch.progress import progress
from fxshard.bench import command as bench
from fxshard.bench.target import UsageError
from fxshard.cli import doctor, inspection, search

EXAMPLES = """examples:
  fxshard demo
  fxshard doctor
  fxshard inspect llama-70b --world-size 1024 --html schedule.html
  fxshard bench train --ranks 2 --peer fsdp2,fsdp2-compile,ddp --svg train.svg

fxshard COMMAND --help says more. FXSHARD_LOG=info and FXSHARD_DUMP=folder show what a compilation does.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and give its exit code: 0, 1 where it failed, 2 where it was called wrongly."""
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 2
    arguments, rest = parser.parse_known_args(argv)
    if rest and not getattr(arguments, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    try:
        code: int = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"fxshard: {error}", file=sys.stderr)
        return 2
    except inspection.Failed:
        return 1
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxshard",
        description="A compiler for sharded training on PyTorch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="say which fxshard and torch these are")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    inspection.add_to(commands)
    search.add_to(commands)
    doctor.add_to(commands)
    bench.add_to(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="plan a small model for 8 ranks and print the schedule",
        description="Plan a Llama of six layers for eight ranks and print the schedule: a first look, in seconds.",
    )
    planned = {"world_size": 8, "shard_size": None, "tp": 1, "zero": 3, "hardware": "h200", "budget": None}
    optimizer = {"optimizer": None, "state": "fp32", "offload": "none", "activations": "auto"}
    demo.set_defaults(command=_demo, precision="bf16", **optimizer, **planned)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import torch

        from fxshard._version import __version__

        print(f"fxshard {__version__} (torch {torch.__version__}, Python {sys.version.split()[0]})")
        parser.exit()


def _demo(arguments: argparse.Namespace) -> int:
    """A Llama of six layers for eight ranks: small enough to read whole."""
    with progress(2 + inspection.PLANNING) as report:
        report("importing torch")
        import torch

        from fxshard.bench.models import Llama, LlamaConfig
        from fxshard.planner.hardware import hardware
        from fxshard.schedule.simulate import simulate

        with torch.device("meta"):
            model = Llama(LlamaConfig(vocab=8192, dim=1024, layers=6, heads=8, hidden=2816))
            tokens = torch.empty(4, 1024, dtype=torch.long)
        report("planning for 8 ranks")
        schedule = inspection.planned_by(model, (tokens, tokens), arguments, report)
        machine = hardware(arguments.hardware)
        simulation = simulate(schedule, machine)
    print("A Llama of six layers, planned for eight H200s from shapes alone: no GPU, no process group, no weights.\n")
    inspection.print_step(schedule, simulation, machine)
    print("\nNext: fxshard inspect llama-70b --world-size 1024 --html schedule.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
