"""constants: what is made again where it is used, and what runs as often as the model says."""

import copy

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.schedule.aliases import is_constant
from tests.passes.graphs import Draft, aten
from tests.toy import Linears
from tests.training import full_gradients

CALLS: list[int] = []


@torch.library.custom_op("fxshard_tests::another_each_time", mutates_args=())
def another_each_time(size: int) -> Tensor:
    CALLS.append(size)
    return torch.full((size,), float(len(CALLS)))


@another_each_time.register_fake
def _(size: int) -> Tensor:
    return torch.empty(size)


class Positions(Linears):
    """Layers that make the same positions, in checkpointed regions of their own; may return others."""

    def __init__(self, *, returns: bool = False) -> None:
        super().__init__(width=4)
        self.returns = returns

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        for layer in self.layers:
            x = checkpoint(_scaled_by_positions, layer, x, use_reentrant=False)
        return (x.sum(), torch.zeros(1000)) if self.returns else (x.sum(),)


def _scaled_by_positions(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.sin(layer(x) * torch.arange(4.0))


class Scaled(Linears):
    """Three layers, each scaled by what the operator made once."""

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
    plain = Scaled(width=4)
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


def test_checkpointed_regions_hand_no_constant_on() -> None:
    """Torch merges the positions of all regions, and saves what a later one reads of an earlier one."""
    model = fxshard.compile(Positions(), lowering="eager")
    (loss,) = model(torch.randn(2, 4))
    saved = [tensor.shape for tensor in loss.grad_fn.saved_tensors if tensor.untyped_storage().nbytes()]
    assert saved == [(2, 4)] * 3  # what each region was given; parameters are hollow


def test_a_constant_that_the_model_returns_is_counted() -> None:
    held = []
    for returns in (False, True):
        model = fxshard.compile(Positions(returns=returns), lowering="eager")
        model(torch.randn(2, 4))
        held.append(model.schedule.saved_bytes)
    assert held[1] == held[0] + 4000
