"""Experts on a device: the fused operator against torch's grouped GEMM with an eager activation, and that compiled.

python -m fxshard.bench.moe --shapes 8x4096x2048,64x2048x1408 --tokens 16384
python -m fxshard.bench.moe --shapes 1x4096x11008 --contenders dense,dense-fused --kernels   # a dense MLP
python -m fxshard.bench.moe --write   # the table by which experts="auto" chooses on this device (``expert_costs``)

Contenders take turns; figures are medians over rounds. ``forward`` and ``step`` (forward and backward) are times on the
device alone: calls are queued before the first of them starts. ``host`` is the time Python takes to launch a step on an
idle device; where steps follow one another it is hidden as long as it is shorter. On a CPU it is the step. ``saved`` is
what forward keeps for backward, ``peak`` what forward and backward need at once, gradients included; both on CUDA only.
``--kernels`` times the products of a step one by one as well, against torch's, and against ordinary ones if there is a
single expert.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

from fxshard._torch.progress import progress
from fxshard.bench import products
from fxshard.bench.clock import DeviceClock, take_turns
from fxshard.bench.expert_costs import CPU, CUDA, IMPLEMENTATIONS, measure_costs, path_of_table
from fxshard.bench.harness import Column, Row, Table, listed, parser_of, write
from fxshard.bench.moe_layer import Contender, Layer, backward, dense, eager, error, make_layer, step
from fxshard.bench.target import UsageError
from fxshard.frontend.backend import fxshard_backend
from fxshard.kernels.case import Case
from fxshard.kernels.choose import choose, implementation, refusal
from fxshard.kernels.costs import FOLDER

FUSED = IMPLEMENTATIONS
DENSE = ("dense", "dense-fused")
COLUMNS = (
    Column("forward_ms", "forward ms", ".3f", ratio=True),
    Column("step_ms", "step ms", ".3f", ratio=True, bars="forward and backward", unit="ms"),
    Column("host_ms", "host ms", ".3f", bars="the host, launching them", unit="ms"),
    Column("saved_mib", "saved MiB", ".0f"),
    Column("peak_mib", "peak MiB", ".0f"),
    Column("error", "error", ".1e"),
)


def fused(name: str, form: Contender = eager) -> Contender:
    """The layer as users run it: written in plain PyTorch, captured, and fused by the backend."""
    return torch.compile(form, backend=fxshard_backend, dynamic=False, fullgraph=True, options={"experts": name})


def memory(contender: Contender, layer: Layer) -> tuple[int, int]:
    """Bytes that forward keeps besides its output, and what a step needs at once, results included."""
    if not layer.x.is_cuda:
        return 0, 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = contender(layer)
    saved = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    grads = backward(layer, out)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del grads
    return saved, peak


def measure(layer: Layer, contenders: dict[str, Contender], rounds: int, repeat: int) -> list[Row]:
    figures: dict[str, Row] = {}
    reference = step(eager, layer)
    for name, contender in contenders.items():
        for _ in range(3):
            found = step(contender, layer)
        figures[name] = {"name": name, "error": error(found, reference)}
        del found
    del reference
    for name, contender in contenders.items():
        figures[name]["saved_mib"], figures[name]["peak_mib"] = (b / 2**20 for b in memory(contender, layer))
    clock = DeviceClock(layer.x.device.type)
    steps = {name: partial(step, contender, layer) for name, contender in contenders.items()}
    forwards = {name: partial(contender, layer) for name, contender in contenders.items()}
    with torch.no_grad():  # which is compiled apart
        forward = take_turns(forwards, lambda run: clock.milliseconds(run, repeat), rounds)
    both = take_turns(steps, lambda run: clock.milliseconds(run, repeat), rounds)
    host = take_turns(steps, clock.launching, rounds)
    for name in contenders:
        figures[name] |= {"forward_ms": forward[name], "step_ms": both[name], "host_ms": host[name]}
    return list(figures.values())


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = _parser(device)
    arguments = parser.parse_args()
    if arguments.write is None:
        write(arguments.json, _compare(arguments, device))
        return
    if any(getattr(arguments, name) != parser.get_default(name) for name in ("shapes", "tokens", "kernels")):
        parser.error("--write measures shapes and tokens of its own, and no products: leave out the other options")
    try:
        path = path_of_table(arguments.write, device)
    except UsageError as error:
        parser.error(str(error))
    names = [name for name in IMPLEMENTATIONS if name in arguments.contenders]
    grid = CUDA if device == "cuda" else CPU
    table, shown = measure_costs(grid, names, device, arguments.rounds, arguments.repeat)
    table.write(path)
    print("", shown, f"wrote {path}: {len(table.measurements)} cases on {table.device}", sep="\n")
    write(arguments.json, [shown])


def _parser(device: str) -> argparse.ArgumentParser:
    cuda = device == "cuda"
    parser = parser_of(__doc__)
    shapes = "8x4096x2048,64x2048x1408" if cuda else "8x256x128"
    parser.add_argument("--shapes", default=shapes, help=f"experts × hidden × inner, … (default: {shapes})")
    parser.add_argument("--tokens", type=int, default=16384 if cuda else 512)
    known, usual = listed(("eager", "compile", *DENSE, *FUSED)), "eager,compile,torch,triton,te"
    parser.add_argument("--contenders", type=known, default=usual, help=f"(default: {usual})")
    parser.add_argument("--rounds", type=int, default=15 if cuda else 5)
    parser.add_argument("--repeat", type=int, default=10 if cuda else 2)
    parser.add_argument("--kernels", action="store_true", help="the products of a step one by one, too")
    parser.add_argument(
        "--write",
        nargs="?",
        type=Path,
        const=FOLDER,
        metavar="FILE",
        help='measure a grid of shapes and write the table by which experts="auto" chooses on this device '
        "(default: where fxshard looks for it)",
    )
    return parser


def _compare(arguments: argparse.Namespace, device: str) -> list[Table]:
    tables = []
    cases = [(shape, routed) for shape in arguments.shapes.split(",") for routed in (False, True)]
    with progress(len(cases)) as begin:
        for shape, routed in cases:
            begin(f"{shape}{', routing weights' if routed else ''}: compiling and measuring")
            experts, hidden, inner = map(int, shape.split("x"))
            case = Case(torch.device(device), torch.bfloat16, hidden, inner, experts=experts)
            layer = make_layer(experts, hidden, inner, arguments.tokens, routed, device)
            torch.compiler.reset()
            contenders = _contenders(arguments.contenders, case, experts)
            rows = measure(layer, contenders, arguments.rounds, arguments.repeat)
            default = choose("auto", case).name
            title = f"{shape} {'with' if routed else 'without'} routing weights, the default is {default}"
            made = [Table(title, COLUMNS, rows, "eager")]
            if arguments.kernels and not routed:
                made.append(_kernels(layer, case, arguments.rounds, arguments.repeat))
            print("", *made, sep="\n", flush=True)
            tables += made
            del layer
    return tables


def _kernels(layer: Layer, case: Case, rounds: int, repeat: int) -> Table:
    """The products of a step, by torch, by what ``"auto"`` takes and, of a single expert, without groups."""
    contenders = {name: implementation(name) for name in ("torch", choose("auto", case).name)}
    if layer.offsets.shape[0] == 1:
        contenders = {"dense": products.Dense(), **contenders}
    asked = products.products(layer.x.detach(), layer.offsets, layer.gate_up.detach(), layer.down.detach())
    return products.measure(asked, contenders, case.device.type, rounds, repeat)


def _contenders(names: list[str], case: Case, experts: int) -> dict[str, Contender]:
    chosen: dict[str, Contender] = {"eager": eager}
    for name in names:
        if name == "compile":
            chosen[name] = torch.compile(eager, dynamic=False)
        elif name in DENSE and experts > 1:
            print(f"{name} does not run here: it is one expert, these are {experts}")
        elif name in DENSE:
            chosen[name] = torch.compile(dense, dynamic=False) if name == "dense" else fused("auto", dense)
        elif name in FUSED:
            reason = refusal(name, case)
            if reason is None:
                chosen[name] = fused(name)
            else:
                print(f"{name} does not run here: {reason}")
    return chosen


if __name__ == "__main__":
    main()
