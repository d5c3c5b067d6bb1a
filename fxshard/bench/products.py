"""The six products of a step of experts, one by one: by torch's grouped GEMM, and by what fxshard has instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fxshard.bench.clock import DeviceClock, take_turns
from fxshard.bench.harness import Column, Row, Table
from fxshard.kernels.by_torch import Call, Experts, TorchExperts
from fxshard.kernels.glu import SWIGLU


@dataclass(frozen=True)
class Product:
    """One product, by whichever implementation it is handed."""

    name: str
    flops: int
    run: Callable[[TorchExperts], torch.Tensor]


def products(x: torch.Tensor, offsets: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> list[Product]:
    """For weights as ``nn.Linear`` has them. Gradients and activations are random: only their shapes matter."""
    tokens, hidden = x.shape
    inner = down.shape[-1]
    activation, grad, grad_pre = (torch.randn_like(x[:, :1].expand(-1, n)) for n in (inner, hidden, 2 * inner))
    call = Call(offsets, Experts(gate_up.mT, None, down.mT), None, SWIGLU, False)
    twice, once = 4 * tokens * hidden * inner, 2 * tokens * hidden * inner
    return [
        Product("up, with activation", twice, lambda by: by.up(x, call)[2]),
        Product("down", once, lambda by: by.product(activation, down.mT, offsets)),
        Product("gradient of the activation", once, lambda by: by.product(grad, down, offsets)),
        Product("gradient of the input", twice, lambda by: by.product(grad_pre, gate_up, offsets)),
        Product("weight gradient of up", twice, lambda by: by.weight_gradient(grad_pre, x, offsets)),
        Product("weight gradient of down", once, lambda by: by.weight_gradient(grad, activation, offsets)),
    ]


class Dense(TorchExperts):
    """The products of a single expert without groups: cuBLAS's."""

    def product(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return x.mm(weight[0])

    def weight_gradient(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return a.t().mm(b).unsqueeze(0)


@torch.no_grad()
def measure(asked: list[Product], contenders: dict[str, TorchExperts], device: str, rounds: int, repeat: int) -> Table:
    """By product: microseconds of each contender on the device, medians over rounds in which they take turns, with
    TFLOP/s, and how far the last contender's result is from the first one's."""
    clock = DeviceClock(device)
    rows: list[Row] = []
    for product in asked:
        runs = {name: partial(product.run, by) for name, by in contenders.items()}
        results = [run().float() for run in runs.values()]
        times = take_turns(runs, lambda run: clock.milliseconds(run, repeat), rounds)
        rows.append({"name": product.name, "error": float((results[-1] - results[0]).norm() / results[0].norm())})
        for name, milliseconds in times.items():
            rows[-1] |= {f"{name}_us": milliseconds * 1e3, f"{name}_rate": product.flops / milliseconds / 1e9}
    columns = [(Column(f"{name}_us", f"{name} µs", ".0f"), Column(f"{name}_rate", "TFLOP/s", ".0f")) for name in times]
    return Table("products", (*(c for both in columns for c in both), Column("error", "error", ".1e")), rows)
