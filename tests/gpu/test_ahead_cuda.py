"""compile_ahead on a GPU: after its thread, the first launch finds its kernel compiled."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxshard.kernels import hopper_products
from fxshard.kernels.compile_ahead import compile_ahead
from fxshard.kernels.dense_op import dense_swiglu
from fxshard.kernels.launch import Launches
from fxshard.kernels.window_op import window_attention_backward, window_attention_forward

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def graph_of(operator: object, *args: object) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = []
    for i, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            node = graph.placeholder(f"arg_{i}")
            node.meta["val"] = arg
            nodes.append(node)
        else:
            nodes.append(arg)
    graph.call_function(operator, tuple(nodes))  # type: ignore[arg-type]
    return fx.GraphModule({}, graph)


def compiled(launches: Launches) -> int:
    """Kernels that Triton holds for a function."""
    return sum(len(caches[0]) for caches in launches._kernel.device_caches.values())


def check(launches: Launches, operator: object, *args: object) -> None:
    launches._kernel.device_caches.clear()  # another test may have compiled it
    launches._compiled.clear()
    thread = compile_ahead([graph_of(operator, *args)], torch.device("cuda", 0))
    assert thread is not None
    thread.join()
    ahead = compiled(launches)
    assert ahead > 0
    operator(*args)  # type: ignore[operator]
    torch.cuda.synchronize()
    assert compiled(launches) == ahead


def test_a_dense_mlp() -> None:
    if not hopper_products.available(torch.device("cuda", 0)):
        pytest.skip(str(hopper_products.refusal(torch.device("cuda", 0))))
    x = torch.randn(256, 1024, device="cuda", dtype=BF16)
    gate, up = (torch.randn(768, 1024, device="cuda", dtype=BF16) for _ in range(2))
    down = torch.randn(1024, 768, device="cuda", dtype=BF16)
    check(hopper_products._launches, dense_swiglu, x, gate, up, down, "triton")


def test_attention_to_a_window() -> None:
    from fxshard.kernels import window_kernels  # which needs Triton

    query = torch.randn(2, 3, 200, 64, device="cuda", dtype=BF16)
    key = torch.randn(2, 1, 200, 64, device="cuda", dtype=BF16)
    check(window_kernels._run_forward._narrow, window_attention_forward, query, key, key, None, None, 33, 0, 0.125)
    out, sums = window_attention_forward(query, key, key, None, None, 33, 0, 0.125)
    check(
        window_kernels._run_key_gradients._narrow,
        window_attention_backward,
        *(torch.randn_like(query), query, key, key, out, sums, None, None, 33, 0, 0.125),
    )
