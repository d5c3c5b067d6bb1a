"""move_scales: an adapter's scale goes to its narrow input, with the same bits, and other scales stay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fxshard.passes.context import PassContext
from fxshard.passes.move_scales import move_scales
from fxshard.passes.options import Options
from fxshard.schedule.events import Phase

TOKENS, WIDTH, RANK, OUT = 6, 8, 2, 12
Run = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def adapted(x: Tensor, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """As peft writes LoRA."""
    return F.linear(x, base) + F.linear(F.linear(x, down), up) * 2.0


def captured(run: Run, dtype: torch.dtype = torch.bfloat16) -> tuple[fx.GraphModule, fx.GraphModule, list[Tensor]]:
    """The graph of a function before and after the pass, and inputs."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((3, TOKENS, WIDTH), (OUT, WIDTH), (RANK, WIDTH), (OUT, RANK))
    leaves = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    found: list[Any] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.extend([copy.deepcopy(module), move_scales(module, PassContext((), Options(), Phase.FORWARD)), [*inputs]])
        return found[0].forward  # type: ignore[no-any-return]

    torch._dynamo.reset()
    torch.compile(run, backend=backend, fullgraph=True, dynamic=False)(*leaves)
    before, after, inputs = found
    return before, after, inputs


def scaled_sizes(module: fx.GraphModule) -> list[int]:
    """How many columns each scaled value has, in graphs inside of this one as well."""
    return [
        node.meta["example_value"].shape[-1]
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "mul"
    ]


def results(module: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    (result,) = module(*inputs)
    cotangent = torch.linspace(-1, 1, result.numel()).view_as(result).to(result.dtype)
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    return [result, *torch.autograd.grad(result, leaves, cotangent)]


def checkpointed(*inputs: Tensor) -> Tensor:
    return checkpoint(adapted, *inputs, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [adapted, checkpointed])
def test_the_narrow_input_is_scaled_and_no_bit_changes(run: Run, dtype: torch.dtype) -> None:
    before, after, inputs = captured(run, dtype)
    assert scaled_sizes(before) == [OUT] and scaled_sizes(after) == [RANK]
    for mine, plain in zip(results(after, inputs), results(before, inputs), strict=True):
        assert torch.equal(mine, plain)


def test_backward_writes_no_second_gradient() -> None:
    """What is scaled in backward is as wide as the result before the pass, and as narrow as the adapter after it."""
    before, after, inputs = captured(adapted)
    for module, width in ((before, OUT), (after, RANK)):
        traced = make_fx(lambda *values, module=module: results(module, list(values)))(*inputs)
        scaled = [node for node in traced.graph.nodes if node.target is torch.ops.aten.mul.Tensor]
        assert [node.meta["tensor_meta"].shape[-1] for node in scaled] == [width, width], "in forward and in backward"


NEAR_MISSES: dict[str, Run] = {
    "no power of two": lambda x, base, down, up: F.linear(F.linear(x, down), up) * 1.5,
    "zero": lambda x, base, down, up: F.linear(F.linear(x, down), up) * 0.0,
    "a tensor": lambda x, base, down, up: F.linear(F.linear(x, down), up) * up[0, 0],
    "a bias": lambda x, base, down, up: F.linear(F.linear(x, down), up, base[:, 0]) * 2.0,
    "a narrow result": lambda x, base, down, up: F.linear(x, down) * 2.0,
    "another reader": lambda x, base, down, up: (y := F.linear(F.linear(x, down), up)) * 2.0 + y.sin(),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses(case: str) -> None:
    before, after, _ = captured(NEAR_MISSES[case])
    assert [str(node) for node in before.graph.nodes] == [str(node) for node in after.graph.nodes]


def test_half_precision_might_overflow() -> None:
    assert scaled_sizes(captured(adapted, torch.float16)[1]) == [OUT]
