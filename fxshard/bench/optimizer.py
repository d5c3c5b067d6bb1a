"""Steps of this package's optimizers over the hidden matrices of a Llama, in one run: Muon against
``torch.optim.Muon``, AdamW with its state in every format and place against ``torch.optim.AdamW``.

python -m fxshard.bench.optimizer --device cuda --json optimizer.json
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

import fxshard
from fxshard.bench.clock import take_turns, timed
from fxshard.bench.harness import Column, Table, add_device, parser_of, write
from fxshard.optim import muon_rule as rule
from fxshard.optim.coefficients import triples
from fxshard.optim.newton_schulz import Start, choose, explain, iterate, orthogonalize, start
from fxshard.planner.state import FORMATS, OFFLOADS

ROUNDS, REPEAT = 5, 3
"""Rounds in which contenders take turns, and calls in a row within each."""


def shapes(layers: int, dim: int, hidden: int) -> list[tuple[int, int]]:
    """The hidden matrices of a Llama: attention, gate and up, down."""
    return [(dim, dim)] * 4 * layers + [(hidden, dim)] * 2 * layers + [(dim, hidden)] * layers


def parts(params: list[torch.nn.Parameter], choice: fxshard.Muon) -> dict[str, Callable[[], object]]:
    """The parts of a step, each by itself."""
    grads = [parameter.grad for parameter in params if parameter.grad is not None]
    # Not zeros: products of zeros take less power, and the device is at its limit with others.
    momenta = [grad.clone() for grad in grads]
    directions = orthogonalize(momenta, form=choice.form)
    factors = [rule.scale_factor(parameter.shape, choice.scale) for parameter in params]
    iteration = triples(choice.coefficients, choice.steps)
    by_shape: dict[torch.Size, list[int]] = {}
    for i, buffer in enumerate(momenta):
        by_shape.setdefault(buffer.shape, []).append(i)
    form = {shape: choose(shape, momenta[0].device, choice.form) for shape in by_shape}

    def started() -> list[Start]:
        return [start(form[shape], [momenta[i] for i in of_shape]) for shape, of_shape in by_shape.items()]

    ready = started()
    return {
        "are gradients finite": lambda: rule.finite(grads),
        "momentum": lambda: rule.momentum_(grads, momenta, choice.momentum, choice.nesterov),
        "rounding and norms": started,
        "products": lambda: [
            iterate(form[shape], begin, iteration, tall=shape[0] > shape[1])
            for shape, begin in zip(by_shape, ready, strict=True)
        ],
        "update": lambda: rule.apply_(params, directions, 1e-9, choice.weight_decay, factors),
    }


def adamw(sizes: list[tuple[int, int]], device: str, **kept: str) -> Callable[[], object]:
    """A step of AdamW over sharded matrices, with state kept so."""
    model = torch.nn.ParameterList([0.02 * torch.randn(shape, device=device) for shape in sizes])
    sharded = fxshard.shard(model, optimizer=fxshard.AdamW(lr=1e-9, **kept))  # type: ignore[arg-type]
    for parameter in sharded.parameters():
        parameter.grad = torch.randn_like(parameter)
    return sharded.optimizer.step


def measure(device: str) -> list[Table]:
    """Steps, and the parts of one of Muon's."""
    torch.manual_seed(0)
    sizes = shapes(16, 2048, 5632) if device == "cuda" else shapes(2, 64, 176)
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in sizes]
    for parameter in params:
        parameter.grad = torch.randn_like(parameter)
    choice = fxshard.Muon(lr=1e-3, weight_decay=0.1)
    named = [(f"layers.{i}.weight", parameter) for i, parameter in enumerate(params)]
    contenders: dict[str, Callable[[], object]] = {
        "torch.optim.Muon": torch.optim.Muon(params, lr=1e-3, weight_decay=0.1).step,
        "fxshard.Muon": choice.build(named).step,
        "torch.optim.AdamW, fused": torch.optim.AdamW(params, lr=1e-9, fused=True).step,
    }
    for state, offload in product(FORMATS, OFFLOADS):
        name = f"fxshard.AdamW, {state}" + " on the host" * (offload == "host")
        contenders[name] = adamw(sizes, device, state=state, offload=offload)

    def clock(run: Callable[[], object]) -> float:
        return timed(run, device, REPEAT)

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    parameters = sum(rows * columns for rows, columns in sizes) / 1e6
    forms = (f"{list(shape)}: {explain(shape, params[0].device)}" for shape in dict.fromkeys(sizes))
    title = f"{len(sizes)} matrices, {parameters:.1f} M parameters, {name}; {'; '.join(forms)}"
    steps = take_turns(contenders, clock, ROUNDS)
    taken = take_turns(parts(params, choice), clock, ROUNDS)
    return [
        _table(title, steps, Column("ms", "ms", ".2f", ratio=True, bars="an optimizer step", unit="ms")),
        _table("parts of fxshard.Muon's", taken, Column("ms", "ms", ".2f")),
    ]


def _table(title: str, times: dict[str, float], column: Column) -> Table:
    return Table(title, (column,), [{"name": name, "ms": ms} for name, ms in times.items()], next(iter(times)))


def main() -> None:
    parser = parser_of(__doc__)
    add_device(parser)
    arguments = parser.parse_args()
    tables = measure(arguments.device)
    print(*tables, sep="\n\n")
    write(arguments.json, tables)


if __name__ == "__main__":
    main()
