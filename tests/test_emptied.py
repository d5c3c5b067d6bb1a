"""The plain model after ``compile``: no use of it ends the process or gives values that are not there."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from tests.stack import Stack, batch

REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda plain: torch.save(plain.state_dict(), io.BytesIO()),
    "state_dict of a part": lambda plain: plain.layers[0].state_dict(),
    "load_state_dict": lambda plain: plain.load_state_dict({}),
    "deepcopy": copy.deepcopy,
    "deepcopy of a part": lambda plain: copy.deepcopy(plain.layers[0]),
    "pickle of a part": lambda plain: pickle.dumps(plain.layers[0]),
    "pickle": lambda plain: torch.save(plain, io.BytesIO()),
    "pickle of a parameter": lambda plain: torch.save(next(plain.parameters()), io.BytesIO()),
    "average": lambda plain: torch.optim.swa_utils.AveragedModel(plain),
}


def test_copies_and_state_dicts_are_refused() -> None:
    plain = Stack()
    model = fxshard.compile(plain, lowering="eager")
    for use in REFUSED.values():
        with pytest.raises(fxshard.StateError, match=r"full_state_dict\(\)"):
            use(plain)
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(fxshard.StateError, match=r"full_state_dict\(\)"):
            use(model.layers[0])
    assert model.full_state_dict().keys() == Stack().state_dict().keys()


@pytest.mark.parametrize(
    "write", [lambda p: nn.init.ones_(p), lambda p: p.data.fill_(1.0), lambda p: p.data.copy_(torch.ones_like(p))]
)
def test_writes_to_it_raise(write: Callable[[torch.Tensor], Any]) -> None:
    plain = Stack()
    fxshard.compile(plain, lowering="eager")
    with pytest.raises(RuntimeError, match=r"full_state_dict|data pointer"):
        write(next(plain.parameters()))


def test_saved_tensors_may_go_to_the_host() -> None:
    plain, model = Stack(), fxshard.compile(Stack(), lowering="eager")
    with torch.autograd.graph.save_on_cpu():
        model(*batch(0, 0)).backward()
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch(1, 0))
    loss.backward()
    plain(*batch(0, 0)).backward()
    plain(*batch(1, 0)).backward()
    assert seen, "activations go through the hooks"
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
