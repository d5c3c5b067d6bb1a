"""``fxshard inspect``: plan a step for a machine that is not there, and show the schedule."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxshard._torch.progress import Report, progress
from fxshard.bench.target import UsageError, about, load, parallelizing, shortened, usage_errors
from fxshard.cli.budget import curve, decisions, heading, visibly_faster

if TYPE_CHECKING:
    from torch import nn

    from fxshard.planner.hardware import Hardware
    from fxshard.schedule.schedule import Schedule
    from fxshard.schedule.simulate import Simulation

EXAMPLES = """examples:
  fxshard inspect llama-70b --world-size 1024 --html schedule.html
  fxshard inspect my_model.py:build --world-size 8 --zero 2 --hardware h100 --budget 60GiB
  fxshard inspect llama-8b --world-size 8 --sweep
  fxshard inspect llama-70b --world-size 1024 --shard-size 8
  fxshard inspect llama-70b --world-size 1024 --tp 8
  fxshard inspect llama-8b --world-size 64 --optimizer muon
  fxshard inspect moe-16b --world-size 64 --json > schedule.json
"""
PLANNING = 4
"""Stages that ``fxshard.plan`` reports: ``frontend.planning.STAGES``, which is not imported before it is needed."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    look = commands.add_parser(
        "inspect",
        help="plan a model's training step for any number of ranks and show the schedule",
        description="Plan a training step without process group, GPU or weights, and show the schedule.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    look.add_argument(
        "target",
        metavar="MODEL",
        help="llama-8b, llama-70b, moe-16b, or MODULE:FACTORY (or FILE.py:FACTORY), a function that returns "
        "(module, example_inputs); the module may be on the meta device",
    )
    look.add_argument("--world-size", type=_positive, default=8, metavar="N", help="ranks (default: 8)")
    look.add_argument(
        "--shard-size",
        type=_positive,
        metavar="N",
        help="ranks that hold different shards; the others hold replicas of them (HSDP; default: all ranks)",
    )
    look.add_argument(
        "--tp",
        type=_positive,
        default=1,
        metavar="N",
        help="tensor-parallel ranks, neighbours: llama-8b and llama-70b are cut by torch's styles with sequence "
        "parallelism, a model of your own by parallelize(model, mesh) of its module (default: 1)",
    )
    look.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=3, help="ZeRO stage (default: 3)")
    look.add_argument(
        "--hardware",
        default="h200",
        metavar="NAME",
        help="device and network to plan for: a100, h100, h200, b200, gb200 or cpu (default: h200)",
    )
    look.add_argument("--budget", metavar="SIZE", help='what a rank may hold in all, as "60GiB"')
    look.add_argument(
        "--activations",
        choices=("auto", "recompute", "offload"),
        default="auto",
        help="what is done with saved values for which a budget has no room: computed again, copied to the host and "
        "back, or what is faster (default: auto)",
    )
    look.add_argument(
        "--sweep",
        action="store_true",
        help="print the simulated step time over budgets, from the smallest that works, in place of the table",
    )
    look.add_argument(
        "--precision",
        choices=("bf16", "float8", "mxfp8", "model"),
        default="bf16",
        help="bf16 compute and fp32 reduction (default), linears in float8 or MXFP8, or the dtypes the model has",
    )
    look.add_argument(
        "--optimizer",
        choices=("adamw", "muon", "normuon"),
        help="one of fxshard's own: the schedule then has its step and the gathers that start in it "
        "(default, as in fxshard.compile: none of them, and an optimizer of torch.optim is taken for AdamW)",
    )
    look.add_argument(
        "--state",
        choices=("fp32", "bf16", "8bit", "auto"),
        default="fp32",
        help="how its moments are kept (default: fp32; auto: as a budget needs it)",
    )
    look.add_argument(
        "--offload",
        choices=("none", "host", "auto"),
        default="none",
        help="where: on the device (none), the host, or there for as many buckets as a budget needs (auto)",
    )
    look.add_argument("--layers", type=_positive, metavar="N", help="another number of layers than the model's own")
    look.add_argument("--html", type=Path, metavar="FILE", help="write a page to look at")
    look.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    look.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the schedule as JSON; without FILE, instead of the table",
    )
    look.set_defaults(command=_run)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.sweep and (arguments.json is not None or arguments.trace is not None):
        raise UsageError("--sweep has no schedule to write: leave out --json and --trace, or give one --budget SIZE")
    written = [Path(out) for out in (arguments.html, arguments.trace, arguments.json) if out not in (None, "-")]
    for path in written:  # before planning for a minute
        if not path.absolute().parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no directory {path.absolute().parent}")
    with progress(4 + PLANNING) as report:
        report("importing torch")
        from fxshard.planner.hardware import hardware

        with usage_errors():
            machine = hardware(arguments.hardware)
        report(f"building {arguments.target}")
        with _errors_printed(arguments.target):
            model, inputs = load(arguments.target, arguments.layers)
        report(f"planning {arguments.target} for {arguments.world_size} ranks")
        with _errors_printed(f"planning {arguments.target}"):
            found = planned_by(model, inputs, arguments, report)
        if arguments.sweep:
            simulation = None
        else:
            report(f"simulating on {arguments.hardware}")
            from fxshard.schedule.simulate import simulate

            simulation = simulate(found, machine)
    what = about(arguments.target, arguments.layers, inputs)
    if simulation is None:
        from fxshard.cli import budget_page

        print(curve(found, arguments, what))
        page = partial(
            budget_page.to_html, found, list(visibly_faster(found)), heading(arguments), what, machine.memory_bytes
        )
        _write([(arguments.html, page)])
    else:
        _show(found, simulation, arguments, machine, what)
    return 0


class Failed(Exception):
    """The person at the terminal knows why."""


@contextmanager
def _errors_printed(what: str) -> Iterator[None]:
    """Print why the person's own code, or planning it, failed, without our frames."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        print(f"fxshard: {what} failed:\n{shortened(error)}", end="", file=sys.stderr)
        raise Failed from error


def planned_by(
    model: nn.Module, inputs: tuple[Any, ...] | dict[str, Any], arguments: argparse.Namespace, report: Report
) -> Any:
    """The schedule, or with ``--sweep`` what budgets give."""
    import torch

    from fxshard.optim.config import AdamW, Muon, NorMuon
    from fxshard.planner.float8_policy import Float8
    from fxshard.planner.mxfp8_policy import MXFP8
    from fxshard.planner.precision import Precision

    kept = {"state": arguments.state, "offload": arguments.offload}
    if arguments.optimizer is None and kept != {"state": "fp32", "offload": "none"}:
        raise UsageError("--state and --offload are for fxshard's own optimizers: add --optimizer adamw or muon")
    if arguments.activations != "auto" and arguments.budget is None and not arguments.sweep:
        raise UsageError("--activations says what is done where a budget is tight: add --budget SIZE or --sweep")
    optimizers = {"adamw": AdamW(**kept), "muon": Muon(**kept), "normuon": NorMuon(**kept)}
    precisions: dict[str, Precision] = {
        "bf16": Precision(param=torch.bfloat16, reduce=torch.float32),
        "float8": Float8(),
        "mxfp8": MXFP8(),
    }
    planned: Callable[..., Any]
    if getattr(arguments, "sweep", False):
        from fxshard.frontend.planning import sweep as planned
    else:
        from fxshard.frontend.planning import plan as planned
    with usage_errors():
        return planned(
            model,
            inputs,
            **_ranks(model, arguments),
            hardware=arguments.hardware,
            zero=arguments.zero,
            memory_budget=arguments.budget,
            activations=arguments.activations,
            optimizer=optimizers.get(arguments.optimizer),
            precision=precisions.get(arguments.precision),
            progress=lambda stage: report(f"planning: {stage}"),
        )


def _ranks(model: nn.Module, arguments: argparse.Namespace) -> dict[str, Any]:
    """How many, and along which dimensions."""
    ranks, tensor, shards = arguments.world_size, arguments.tp, arguments.shard_size
    if tensor == 1:
        return {"world_size": ranks, "shard_size": shards}
    if ranks % tensor or (shards is not None and ranks // tensor % shards):
        raise UsageError(f"--tp {tensor}: --world-size {ranks} is no multiple of it (times --shard-size, if given)")
    data = {"dp": ranks // tensor}
    if shards is not None:
        data = {"dp_replicate": ranks // tensor // shards, "dp_shard": shards}
    return {"mesh": {**data, "tp": tensor}, "parallelize": parallelizing(arguments.target, model)}


def _show(
    schedule: Schedule, simulation: Simulation, arguments: argparse.Namespace, machine: Hardware, about: str
) -> None:
    from fxshard.schedule.files import to_json
    from fxshard.schedule.html import to_html
    from fxshard.schedule.trace import to_chrome_trace

    if arguments.json == "-":
        print(to_json(schedule))
    else:
        print(about)
        print_step(schedule, simulation, machine)
    _write(
        [
            (arguments.json if arguments.json != "-" else None, lambda: to_json(schedule)),
            (arguments.html, lambda: to_html(schedule, simulation, machine, about)),
            (arguments.trace, lambda: to_chrome_trace(schedule, simulation)),
        ]
    )


def _write(outputs: Sequence[tuple[str | Path | None, Callable[[], str]]]) -> None:
    """Write each output that has a path."""
    for path, text in outputs:
        if path is None:
            continue
        try:
            Path(path).write_text(text(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        print(f"wrote {path}", file=sys.stderr)


def print_step(schedule: Schedule, simulation: Simulation, hardware: Hardware) -> None:
    from fxshard.schedule.html import duration
    from fxshard.schedule.schedule import size
    from fxshard.schedule.table import render

    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(render(schedule, colour=colour))
    step, exposed = simulation.step_seconds, simulation.exposed_seconds
    share = f" ({exposed / step:.1%})" if step else ""
    print(
        f"simulated on {hardware.name}: step {duration(step)} · compute {duration(simulation.compute_seconds)} · "
        f"communication {duration(simulation.communication_seconds)}, exposed {duration(exposed)}{share}\n"
        f"no order of events is faster than {duration(simulation.bound_seconds)} · "
        f"peak with activations {size(simulation.peak_bytes)}"
    )
    if schedule.budget is not None:
        print(decisions(schedule, hardware))
