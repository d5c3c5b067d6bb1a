"""Functions and models before and after `recognize_masks`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxshard.passes.context import PassContext
from fxshard.passes.options import Debug, Options
from fxshard.passes.recognize_masks import recognize_masks
from fxshard.schedule.attention_report import AttentionReport
from fxshard.schedule.events import Phase

S, DIM = 5, 4
INF = float("inf")


class Rewritten:
    """A captured function before and after the pass."""

    def __init__(
        self, run: Callable[..., Any], *args: Any, dynamic: bool | None = False, windows: bool | None = None
    ) -> None:
        context = PassContext((), Options(debug=Debug(window_attention=windows)), Phase.FORWARD)
        self.report: AttentionReport = context.attention

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            self.before = copy.deepcopy(module)
            self.after = recognize_masks(module, context)
            return run_before

        def run_before(*inputs: Any) -> Any:
            self.inputs = list(inputs)
            return self.before(*inputs)

        torch._dynamo.reset()
        torch.compile(run, backend=backend, fullgraph=True, dynamic=dynamic)(*args)

    def attention(self) -> list[fx.Node]:
        graphs = [part.graph for part in self.after.modules() if isinstance(part, fx.GraphModule)]
        return [node for graph in graphs for node in graph.nodes if node.target is F.scaled_dot_product_attention]

    def compare(self) -> tuple[list[Tensor], list[Tensor]]:
        """The output and the gradients of all inputs that have one, of the original and of what the pass made."""
        return _results(self.before, self.inputs), _results(self.after, self.inputs)


def _results(module: fx.GraphModule, inputs: list[Any]) -> list[Tensor]:
    torch.manual_seed(0)
    (output,) = module(*inputs)
    leaves = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def check_equal(found: Rewritten) -> None:
    before, after = found.compare()
    assert all(map(torch.equal, before, after))


def check_close(found: Rewritten, tolerance: float) -> None:
    """The output is the same; gradients of heads that were repeated are sums in another order."""
    (expected, *before), (output, *after) = found.compare()
    assert torch.equal(output, expected)
    for mine, theirs in zip(after, before, strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


def qkv(heads: int = 4, kv: int = 4, dtype: torch.dtype = torch.float32, dim: int = DIM, s: int = S) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, kv, kv)
    return [torch.randn(2, n, s, dim, generator=generator).to(dtype).requires_grad_() for n in sizes]


def lower() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def repeat_kv(x: Tensor, n: int = 2) -> Tensor:
    batch, heads, length, dim = x.shape
    return x[:, :, None, :, :].expand(batch, heads, n, length, dim).reshape(batch, heads * n, length, dim)
