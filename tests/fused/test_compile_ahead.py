"""compile_ahead: which calls of a graph have kernels to compile, and launches that compile without launching."""

from typing import Any, NamedTuple

import torch
from torch import fx

from fxshard.kernels.compile_ahead import compile_ahead, kernel_calls
from fxshard.kernels.dense_op import dense_swiglu
from fxshard.kernels.launch import Launches, Pointer, aligned, only_compiling


def mlp(implementation: str, rows: Any = 8) -> fx.Graph:
    graph = fx.Graph()
    shapes = {"x": (rows, 4), "gate": (6, 4), "up": (6, 4), "down": (4, 6)}
    nodes = [graph.placeholder(name) for name in shapes]
    for node, shape in zip(nodes, shapes.values(), strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    graph.call_function(dense_swiglu, (*nodes, implementation))
    graph.call_function(torch.ops.aten.mm.default, (nodes[0], nodes[1]))
    return graph


def test_calls_of_our_kernels_are_found() -> None:
    ((operator, args),) = kernel_calls(mlp("triton"))
    assert operator is dense_swiglu
    assert [tuple(arg.shape) for arg in args[:-1]] == [(8, 4), (6, 4), (6, 4), (4, 6)]


def test_other_implementations_have_no_kernels_of_ours() -> None:
    assert list(kernel_calls(mlp("torch"))) == []


def test_nothing_is_started_on_a_cpu() -> None:
    assert compile_ahead([fx.GraphModule({}, mlp("triton"))], torch.device("cpu")) is None


class Block(NamedTuple):
    base: torch.Tensor
    width: int


class Kernel:
    """Stands in for a compiled function of Triton's."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...]) -> None:
        self.compiled.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launched.append(args)


def test_only_compiling_launches_nothing() -> None:
    """Triton is asked with pointers of the right dtypes; a tensor at an odd address counts as aligned."""
    kernel = Kernel()
    launches = Launches(kernel)
    odd = torch.empty(64, dtype=torch.uint8)[1:]
    with only_compiling():
        assert aligned(odd)
        launches("key", (1, 1, 1), (odd, Block(odd, 3), 7))
    assert not aligned(odd)
    assert kernel.launched == []
    pointer = Pointer(torch.uint8)
    assert kernel.compiled == [(pointer, (pointer, 3), 7)]
    launches("key", (1, 1, 1), (odd, Block(odd, 3), 7))
    assert len(kernel.launched) == 1
    with only_compiling():  # as for a second model with the same layers
        launches("key", (1, 1, 1), (odd, Block(odd, 3), 7))
    assert len(kernel.launched) == 1
