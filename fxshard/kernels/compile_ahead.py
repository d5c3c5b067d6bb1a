"""Our operators' Triton kernels are compiled on a thread, while Inductor compiles the segments that call them.

Triton compiles a kernel when it is first launched. For the products of ``hopper_kernels`` that took 3 s of a first
step, and as it is Triton's first kernel, its own start as well: a ``transformers`` Llama's first step on an H200 took
27.9 s without this thread and 21.5 s with it (docs/design/compile-path.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from fxshard._torch import private
from fxshard.kernels.launch import only_compiling
from fxshard.kernels.ops import COMPILED_AHEAD, has_triton

Call = tuple[Any, tuple[Any, ...]]
"""An operator, and what it is called with."""


def compile_ahead(graphs: Iterable[fx.GraphModule], device: torch.device) -> threading.Thread | None:
    """Begin to compile the kernels of all operators in ``graphs`` that run on ``device``; None where there are none."""
    if device.type != "cuda" or not has_triton():
        return None
    found = (call for graph in graphs for call in kernel_calls(graph.graph))
    # Before the thread starts: the device of a fake tensor is another while its mode, in its own thread, runs a kernel.
    blank = [(operator, tree_map_only(torch.Tensor, Blank.of, args)) for operator, args in found]
    calls = {repr(call): call for call in blank}
    if not calls:
        return None
    thread = threading.Thread(target=_compile, args=(list(calls.values()), device), name="fxshard kernels")
    thread.start()
    return thread


def kernel_calls(graph: fx.Graph) -> Iterable[Call]:
    """Calls of operators with kernels to compile, by the implementation that has them, of sizes that are known."""
    for operator in COMPILED_AHEAD:
        for node in graph.find_nodes(op="call_function", target=operator):
            args = fx.map_arg(node.args, lambda arg: arg.meta["val"])
            implementations = [arg for arg in args if isinstance(arg, str)]
            if implementations in ([], ["triton"]) and not any(map(_is_symbolic, tree_leaves(args))):
                yield operator, args


def _is_symbolic(value: Any) -> bool:
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


@dataclass(frozen=True)
class Blank:
    """What a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Blank:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def tensor(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def _compile(calls: list[Call], device: torch.device) -> None:
    with torch.cuda.device(device), torch.no_grad(), private.fake_tensors(), only_compiling():
        for operator, args in calls:
            COMPILED_AHEAD[operator](*tree_map_only(Blank, Blank.tensor, args))
