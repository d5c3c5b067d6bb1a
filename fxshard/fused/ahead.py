"""Kernels of experts and of dense MLPs, compiled in other processes while the model is traced: one after the other at
their first launch, they would take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fxshard.elsewhere import compile_elsewhere
from fxshard.fused.dense_op import dense_mlp, dense_swiglu
from fxshard.fused.glu import SWIGLU, Glu
from fxshard.fused.op import grouped_product, grouped_swiglu, grouped_swiglu_backward, grouped_wgrad


@dataclass(frozen=True)
class Product:
    """Rows times the matrix of their expert."""

    experts: int
    turned: bool
    """Whether the columns of the matrices are dense, not their rows."""


@dataclass(frozen=True)
class Up(Product):
    """The first product with the activation."""

    glu: Glu
    weights: torch.dtype | None


@dataclass(frozen=True)
class Gradient:
    """A weight gradient."""


Kernel = Product | Up | Gradient


def compile_ahead(graph: fx.Graph, device: torch.device, begun: set[Kernel]) -> None:
    """Start compiling what a captured graph or a joint one will launch, but for what was ``begun`` before; wait for
    nothing.
    """
    for kernel in dict.fromkeys(kernels(graph)):
        if kernel not in begun:
            begun.add(kernel)
            compile_elsewhere(partial(compile_kernel, kernel), device)


def kernels(graph: fx.Graph) -> Iterator[Kernel]:
    """Kernels of our own that a graph launches, as far as it says what its nodes' values are."""
    for node in graph.nodes:
        find = _FIND.get(node.target)
        if find is None or node.args[-1] != "triton":
            continue
        values = {source: source.meta.get("val", source.meta.get("example_value")) for source in node.all_input_nodes}
        if all(value is not None for value in values.values()):
            yield from find(*fx.map_arg(node.args, values.__getitem__))


def compile_kernel(kernel: Kernel, capability: int) -> None:
    """Compile one for a GPU of that compute capability (90: 9.0)."""
    from fxshard.fused import hopper_products

    if isinstance(kernel, Gradient):
        hopper_products.compile_gradient(capability)
    elif isinstance(kernel, Up):
        hopper_products.compile_up(kernel.experts, kernel.turned, kernel.glu, kernel.weights, capability)
    else:
        hopper_products.compile_product(kernel.experts, kernel.turned, capability)


def _product(weight: torch.Tensor) -> Product:
    return Product(weight.shape[0], weight.stride(-1) != 1)


def _forward(x: Any, offsets: Any, gate: Any, up: Any, down: Any, *rest: Any) -> Iterator[Kernel]:
    weights, *glu = rest[3:-2]
    first = _product(gate)
    yield Up(first.experts, first.turned, Glu(*glu), weights.dtype if weights is not None else None)
    yield _product(down)


def _backward(grad: Any, offsets: Any, gate: Any, up: Any, down: Any, *_: Any) -> Iterator[Kernel]:
    yield _product(down.mT)
    yield _product(gate.mT)


def _dense(x: Any, gate: torch.Tensor, *_: Any) -> Iterator[Kernel]:
    yield Up(1, gate.stride(-1) == 1, SWIGLU, None)  # which multiplies by its transpose


_FIND: dict[Any, Callable[..., Iterator[Kernel]]] = {
    grouped_swiglu: _forward,
    dense_swiglu: _dense,
    dense_mlp: _dense,
    grouped_swiglu_backward: _backward,
    grouped_product: lambda x, weight, *_: iter([_product(weight)]),
    grouped_wgrad: lambda *_: iter([Gradient()]),
}
