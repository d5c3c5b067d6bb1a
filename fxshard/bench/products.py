"""The six products of a step of experts, one by one: by torch's grouped GEMM, and by what fxshard has instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fxshard.bench.clock import DeviceClock, take_turns
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
def measure(
    asked: list[Product], contenders: dict[str, TorchExperts], device: str, rounds: int, repeat: int
) -> dict[str, dict[str, float]]:
    """By product: microseconds of each contender on the device, medians over rounds in which they take turns, and how
    far the last contender's result is from the first one's."""
    clock = DeviceClock(device)
    figures: dict[str, dict[str, float]] = {}
    for product in asked:
        runs = {name: partial(product.run, by) for name, by in contenders.items()}
        results = [run().float() for run in runs.values()]
        times = take_turns(runs, lambda run: clock.milliseconds(run, repeat), rounds)
        figures[product.name] = {f"{name}_us": milliseconds * 1e3 for name, milliseconds in times.items()}
        figures[product.name]["error"] = float((results[-1] - results[0]).norm() / results[0].norm())
    return figures


def show(asked: list[Product], figures: dict[str, dict[str, float]], contenders: list[str]) -> None:
    print(f"{'':28}" + "".join(f"{name:>19}" for name in contenders) + f"{'error':>9}")
    for product in asked:
        found = figures[product.name]
        times = "".join(
            f"{found[f'{name}_us']:9.0f} µs{product.flops / found[f'{name}_us'] / 1e6:5.0f} T" for name in contenders
        )
        print(f"{product.name:28}{times}{found['error']:9.1e}")
