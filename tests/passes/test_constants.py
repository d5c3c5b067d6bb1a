"""constants: what is made again where it is used, and what runs as often as the model says."""

import copy

import torch
from torch import Tensor, nn

import fxshard
from fxshard.passes.constants import is_constant
from tests.passes.graphs import Draft, aten
from tests.training import full_gradients

CALLS: list[int] = []


@torch.library.custom_op("fxshard_tests::another_each_time", mutates_args=())
def another_each_time(size: int) -> Tensor:
    CALLS.append(size)
    return torch.full((size,), float(len(CALLS)))


@another_each_time.register_fake
def _(size: int) -> Tensor:
    return torch.empty(size)


class Scaled(nn.Module):
    """Three layers, each scaled by what the operator made once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scale = another_each_time(4)
        for layer in self.layers:
            x = torch.sin(layer(x)) * scale
        return x.sum()


def test_numbers_alone_make_a_constant() -> None:
    draft = Draft()
    x = draft.input("x", 4)
    made = [
        draft.call(aten.arange.default, 4, device="meta"),
        draft.call(aten.full.default, [4], 1j, device="meta"),
        draft.call(aten.rand.default, [4], device="meta"),
        draft.call(aten.ones_like.default, x),
    ]
    assert [is_constant(node) for node in made] == [True, True, False, False]


def test_an_operator_of_a_users_runs_once() -> None:
    """Forward and backward of all layers read the same: another one in backward would be a wrong gradient."""
    plain = Scaled()
    model = fxshard.compile(copy.deepcopy(plain), lowering="eager")
    x = torch.randn(2, 4)
    CALLS.clear()
    plain(x).backward()
    CALLS.clear()
    model(x).backward()
    assert CALLS == [4]
    gradients = full_gradients(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
