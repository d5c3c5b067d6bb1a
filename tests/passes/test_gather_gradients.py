"""gather_gradients: gradients of gathers by permutations are plain PyTorch's, and nothing is added up."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxshard
from fxshard.passes.gather_gradients import gather_gradients
from tests.passes.graphs import aten, context
from tests.thorough import thorough

Gather = Callable[[Tensor, Tensor], Tensor]


def inverse_of(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return inverse


def differentiated(gather: Gather) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(x: Tensor, keys: Tensor, tangent: Tensor) -> Tensor:
        gradient: Tensor = torch.func.vjp(lambda x: gather(x, keys), x)[1](tangent)[0]
        return gradient

    return run


def sums(module: fx.GraphModule) -> int:
    """How many nodes add rows up, each to where it came from."""
    return sum(
        node.args[3:] == (True,) for node in module.graph.find_nodes(op="call_function", target=aten.index_put.default)
    )


def traced(gather: Gather, *inputs: Tensor) -> tuple[fx.GraphModule, int, int]:
    """The graph of a gradient after the pass, and how many sums there were before and after it."""
    module = make_fx(torch.func.functionalize(differentiated(gather)), tracing_mode="fake")(*inputs)
    before = sums(module)
    return gather_gradients(module, context()), before, sums(module)


GATHERS: dict[str, Gather] = {
    "by the order": lambda x, keys: x[keys.argsort()],
    "by a stable order": lambda x, keys: x[keys.sort(stable=True).indices],
    "by the inverse": lambda x, keys: x[inverse_of(keys.argsort())],
    "by the order of the order": lambda x, keys: x[keys.argsort().argsort()],
    "there and back": lambda x, keys: x[keys.argsort()].sin()[inverse_of(keys.argsort())],
}


@pytest.mark.parametrize("gather", GATHERS.values(), ids=GATHERS)
@given(length=st.integers(2, 9), width=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_rows_in_the_inverse_order(gather: Gather, length: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, tangent = torch.randn(length, width), torch.randn(length, width)
    keys = torch.randint(3, (length,))  # with equal ones
    module, before, after = traced(gather, x, keys, tangent)
    assert before and not after
    assert torch.equal(module(x, keys, tangent), differentiated(gather)(x, keys, tangent))


@given(rows=st.integers(1, 6), times=st.integers(2, 4), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_rows_that_are_gathered_several_times_are_added_up_once(rows: int, times: int, seed: int) -> None:
    def gather(x: Tensor, keys: Tensor) -> Tensor:
        return x[keys.argsort() // times]

    torch.manual_seed(seed)
    x, tangent = torch.randn(rows, 2), torch.randn(rows * times, 2)
    keys = torch.randint(4, (rows * times,))
    module, before, after = traced(gather, x, keys, tangent)
    assert before and not after
    torch.testing.assert_close(module(x, keys, tangent), differentiated(gather)(x, keys, tangent))
    halves = x.bfloat16(), keys, tangent.bfloat16()
    rounded_once = torch.stack(
        [tangent.bfloat16()[keys.argsort() // times == row].double().sum(0) for row in range(rows)]
    )
    torch.testing.assert_close(traced(gather, *halves)[0](*halves).double(), rounded_once, rtol=2**-8, atol=0)


NEAR_MISSES: dict[str, Gather] = {
    "any indices": lambda x, keys: x[keys],
    "sorted values": lambda x, keys: x[keys.sort().values],
    "part of an order": lambda x, keys: x[keys.argsort()[:4]],
    "an order of other numbers": lambda x, keys: x[keys.argsort() % 3],
    "a sum that is divided": lambda x, keys: x[(keys.argsort() + 1) // 2],
    "not as often each": lambda x, keys: x[keys.argsort() // 4],
    "orders of rows": lambda x, keys: x[keys.view(2, 4).argsort(1)],
    "a second dimension": lambda x, keys: x[:, keys.argsort() // 4],
    "numbers from one on": lambda x, keys: x[
        torch.zeros_like(keys).index_put((keys.argsort(),), torch.arange(1, 9) % 8)
    ],
}


@pytest.mark.parametrize("gather", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_are_left_alone(gather: Gather) -> None:
    torch.manual_seed(0)
    x, keys = torch.randn(8, 3), torch.randint(3, (8,))
    tangent = torch.randn_like(gather(x, keys))
    module, before, after = traced(gather, x, keys, tangent)
    assert before == after > 0
    assert torch.equal(module(x, keys, tangent), differentiated(gather)(x, keys, tangent))


class Routed(nn.Module):
    """Tokens sorted by expert and back, each to two experts, as ``transformers`` does it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x).softmax(-1).topk(2)
        order = experts.reshape(-1).argsort()
        y = self.second(self.first(x)[order // 2].tanh()) * weights.reshape(-1)[order].unsqueeze(-1)
        return y[inverse_of(order)].view(*experts.shape, 8).sum(1).square().mean()


@pytest.mark.parametrize("lowering", ["eager", thorough("inductor")])
def test_a_sharded_mixture_has_plain_torchs_gradients(lowering: str) -> None:
    torch.manual_seed(0)
    plain, twin = Routed(), Routed()
    twin.load_state_dict(plain.state_dict())
    model = fxshard.compile(twin, optimizer=fxshard.AdamW(lr=0.1), lowering=lowering)
    x = torch.randn(6, 8)
    plain(x).backward()
    model(x).backward()
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=0 if lowering == "eager" else 1e-5, atol=1e-8)
    assert not sums(model.graphs["backward"])
