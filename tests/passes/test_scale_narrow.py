"""scale_narrow: a power of two moves to the narrower operand of a product, and no bit changes."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.passes.scale_narrow import scale_narrow
from tests.passes.graphs import context
from tests.thorough import thorough


class Adapted(nn.Module):
    """A layer with an adapter beside it, as peft writes it."""

    def __init__(self, scaling: float, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.a = nn.Linear(24, 20, dtype=dtype), nn.Linear(24, 4, bias=False, dtype=dtype)
        self.b = nn.Linear(4, 20, bias=bias, dtype=dtype)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.b(self.a(x)) * self.scaling


def captured(run: Callable[..., Tensor], *inputs: Tensor) -> fx.GraphModule:
    found: list[fx.GraphModule] = []
    torch.compile(run, backend=lambda graph, _: found.append(graph) or graph, fullgraph=True)(*inputs)  # type: ignore[func-returns-value]
    return found[0]


def scaled_at(module: fx.GraphModule) -> list[int]:
    """How wide what is multiplied by numbers is."""
    return [
        node.args[0].meta["example_value"].shape[-1]
        for node in module.graph.nodes
        if node.target in (operator.mul, torch.mul)
    ]


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = model(x)
    out.float().square().mean().backward()
    return [out.detach(), *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("scaling", "dtype"),
    [
        (0.25, torch.bfloat16),
        (-4, torch.float32),
        *(thorough(*case) for case in product((2.0, 1), (torch.float32, torch.bfloat16))),
    ],
)
def test_no_bit_changes(scaling: float, dtype: torch.dtype) -> None:
    plain = Adapted(scaling, dtype)
    x = torch.randn(7, 24, dtype=dtype)
    sharded = fxshard.compile(copy.deepcopy(plain), lowering="eager")
    for mine, theirs in zip(step(sharded, x), step(plain, x), strict=True):
        assert torch.equal(mine, theirs)
    graph = captured(plain, x)
    assert scaled_at(graph) == [20]
    assert scaled_at(scale_narrow(graph, context())) == [4]


def test_inside_a_checkpointed_region() -> None:
    class Checkpointed(Adapted):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    graph = scale_narrow(captured(Checkpointed(2.0), torch.randn(7, 24)), context())
    inner = [part for part in graph.modules() if isinstance(part, fx.GraphModule) and part is not graph]
    assert [width for part in inner for width in scaled_at(part)] == [4]


class Squeezed(nn.Module):
    """What is scaled is narrower than what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2.0


class Twice(Adapted):
    """The product is read unscaled, too."""

    def forward(self, x: Tensor) -> Tensor:
        wide = self.b(self.a(x))
        return self.layer(x) + wide * 2.0 + wide


class Detached(Adapted):
    """The product is scaled where no gradient is recorded."""

    def forward(self, x: Tensor) -> Tensor:
        wide = self.b(self.a(x))
        with torch.no_grad():
            scaled = wide * 2.0
        return self.layer(x) + scaled


LEFT: dict[str, Callable[[], nn.Module]] = {
    "no power of two": lambda: Adapted(3.0),
    "zero": lambda: Adapted(0.0),
    "a bias": lambda: Adapted(2.0, bias=True),
    "float16": lambda: Adapted(2.0, torch.float16),
    "a narrower result": Squeezed,
    "read elsewhere": lambda: Twice(2.0),
    "scaled without gradients": lambda: Detached(2.0),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    model = LEFT[name]()
    graph = captured(model, torch.randn(7, 24, dtype=next(model.parameters()).dtype))
    before = scaled_at(graph)
    assert before and scaled_at(scale_narrow(graph, context())) == before


def test_a_product_of_functions() -> None:
    def run(h: Tensor, b: Tensor) -> Tensor:
        return 0.5 * F.linear(h, b)

    h, b = torch.randn(3, 2), torch.randn(5, 2)
    graph = scale_narrow(captured(run, h, b), context())
    assert scaled_at(graph) == [2]
    assert torch.equal(graph(h, b)[0], run(h, b))
