"""sum_products: an adapter's product is computed with its layer's, forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.kernels.sum_op import sum_of_products
from fxshard.passes.context import PassContext
from fxshard.passes.sum_products import sum_products
from fxshard.planner.hardware import hardware
from tests.passes.graphs import context

BF16 = torch.bfloat16
Step = Callable[..., Tensor]


def planned(machine: str = "h200") -> PassContext:
    """For a machine whose kernels this one does not have."""
    return replace(context(), planned_experts="auto", hardware=hardware(machine))


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, dtype=dtype) * shape[-1] ** -0.5


def traced(run: Step, *inputs: Tensor) -> fx.GraphModule:
    return make_fx(torch.func.functionalize(run), tracing_mode="fake")(*inputs)


def sums(module: fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=sum_of_products))


def adapted(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ w.t() + (x @ a.t()) @ b.t()


def inputs(rows: int = 6, width: int = 576, out: int = 512, rank: int = 16, dtype: torch.dtype = BF16) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (rows, width), (out, width), (rank, width), (out, rank)
    return [random(*shape, dtype=dtype) for shape in shapes]


def gradient(run: Step) -> Step:
    """Of the first input, for a tangent that comes last."""

    def backward(x: Tensor, *rest: Tensor) -> Tensor:
        *others, tangent = rest
        return torch.func.vjp(lambda x: run(x, *others), x)[1](tangent)[0]

    return backward


def check(run: Step, given: list[Tensor], count: int) -> None:
    """So many sums are found, and the results are as near to those in fp64 as without the pass."""
    module = traced(run, *given)
    before = module(*given)
    assert sums(sum_products(module, planned())) == count
    exact = run(*(value.double() for value in given))
    distances = [(found.double() - exact).norm() / exact.norm() for found in (module(*given), before)]
    assert distances[0] <= 1.2 * distances[1] < 0.01


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 9), rank=st.sampled_from([8, 16, 64, 128]), shape=st.sampled_from([(512, 576), (1024, 512)]))
def test_a_layer_and_its_adapter(rows: int, rank: int, shape: tuple[int, int]) -> None:
    width, out = shape
    given = inputs(rows, width, out, rank)
    check(adapted, given, 1)
    check(gradient(adapted), [*given, random(rows, out)], 1)


def test_layers_that_read_the_same() -> None:
    """Their gradients are one sum: each small product goes to a large one."""

    def both(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.cat([adapted(x, *weights[:3]), adapted(x, *weights[3:])], 1)

    first, second = inputs(), inputs(out=640)[1:]
    check(both, [*first, *second], 2)
    check(gradient(both), [*first, *second, random(6, 512 + 640)], 2)


def test_what_else_is_added_stays() -> None:
    def residual(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x + adapted(x, w, a, b)

    given = inputs(width=512)
    check(residual, given, 1)
    check(gradient(residual), [*given, random(6, 512)], 1)


def test_a_value_that_is_added_twice_stays() -> None:
    def doubled(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x + x) + adapted(x, w, a, b)

    given = inputs(width=512)
    check(doubled, given, 1)
    check(gradient(doubled), [*given, random(6, 512)], 1)


def test_rows_in_several_dimensions() -> None:
    def sequences(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        wide, narrow = (x.view(-1, x.shape[-1]) @ w.t()).view(2, 3, -1), x.view(-1, x.shape[-1]) @ a.t()
        return wide + (narrow @ b.t()).view(2, 3, -1)

    x, *weights = inputs()
    check(sequences, [x.view(2, 3, -1), *weights], 1)


LEFT: dict[str, tuple[Step, list[Tensor]]] = {
    "fp32": (adapted, inputs(dtype=torch.float32)),
    "a large second product": (adapted, inputs(rank=320)),
    "a rank that is no multiple of eight": (adapted, inputs(rank=12)),
    "a small first product": (adapted, inputs(width=448)),
    "an odd depth": (adapted, inputs(width=520)),
    "a width that is no multiple of eight": (adapted, inputs(out=516)),
    "a factor": (lambda x, w, a, b: torch.add(x @ w.t(), (x @ a.t()) @ b.t(), alpha=2), inputs()),
    "a bias only": (lambda x, w, a, b: x @ w.t() + b[:, 0], inputs()),
    "the same product twice": (lambda x, w, a, b: (wide := x @ w.t()) + wide, inputs()),
    "a product that is read elsewhere": (
        lambda x, w, a, b: torch.cat([(wide := x @ w.t()) + (x @ a.t()) @ b.t(), wide]),
        inputs(),
    ),
    "a product of another shape": (
        lambda x, w, a, b: (x @ w.t()).view(12, 256) + (x @ a.t()).repeat(2, 1) @ b[:256].t(),
        inputs(),
    ),
    "one that lies the other way": (lambda x, w, a, b: x @ w + (x @ a.t()) @ b.t(), inputs(width=512)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    run, given = LEFT[name]
    module = traced(run, *given)
    before = str(module.graph)
    assert sums(sum_products(module, planned())) == 0 and str(module.graph) == before


@pytest.mark.parametrize("machine", ["a100", "b200", "cpu"])
def test_other_machines_have_no_kernel(machine: str) -> None:
    assert sums(sum_products(traced(adapted, *inputs()), planned(machine))) == 0


def test_this_machine_has_none() -> None:
    if not torch.cuda.is_available():
        assert sums(sum_products(traced(adapted, *inputs()), context())) == 0
