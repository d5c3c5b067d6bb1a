"""``torch.autograd.grad`` of a model's inputs: theirs alone, as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from tests.pool import Pool
from tests.thorough import thorough
from tests.training import full_gradients


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()


def found(zero: int, kept: bool = False) -> dict[str, Any]:
    """Gradients of inputs, and what parameters have: before any backward, and between two."""
    model = fxshard.compile(plain(), zero=zero, optimizer=fxshard.AdamW(lr=0.1), lowering="eager")
    x = inputs()
    (first,) = torch.autograd.grad(model(x).square().sum(), x)
    unset = all(p.grad is None for p in model.parameters())
    with pytest.raises(fxshard.StateError, match="asked for those of inputs alone"):
        model.optimizer.step()
    if kept:
        with model.no_sync():
            model(x.detach()).sum().backward()
    else:
        model(x.detach()).sum().backward()
    (second,) = torch.autograd.grad(model(x).square().sum(), x)
    model(x.detach()).sum().backward()
    grads = full_gradients(model)
    model.optimizer.step()
    return {"inputs": [first, second], "unset": unset, "grads": grads}


def compare(run: dict[str, Any]) -> None:
    reference, x = plain(), inputs()
    (wanted,) = torch.autograd.grad(reference(x).square().sum(), x)
    for _ in range(2):
        reference(x.detach()).sum().backward()
    assert run["unset"]
    for gradient in run["inputs"]:
        torch.testing.assert_close(gradient, wanted)
    torch.testing.assert_close(run["grads"], {name: p.grad for name, p in reference.named_parameters()})


@pytest.mark.parametrize("zero", [thorough(0), 3])
def test_in_one_process(zero: int) -> None:
    compare(found(zero))


@pytest.mark.parametrize(("zero", "kept"), [thorough(0, True), thorough(1, True), (3, True), thorough(3, False)])
def test_on_two_ranks(zero: int, kept: bool, ranks: Pool) -> None:
    """Also while ``no_sync`` keeps gradients, which stay as they are."""
    for run in ranks(2, found, zero, kept):
        compare(run)
