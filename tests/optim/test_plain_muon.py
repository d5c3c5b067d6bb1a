"""Muon and AdamW over plain tensors: equal to torch's own, one optimizer, and never poisoned."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.optim.newton_schulz import orthogonalize
from tests.optim.reference import check_steps

TINY = LlamaConfig(vocab=64, dim=32, layers=1, heads=2, hidden=48)
ADJUST = {"spectral": "original", "rms": "match_rms_adamw"}


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))


def train(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        model(tokens(step), tokens(step + 1)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.shows("O2")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["spectral", "rms"])
def test_equals_torch_within_bf16_rounding(scale: str, nesterov: bool) -> None:
    shapes = [(32, 32), (48, 32), (32, 48)]
    mine = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = copy.deepcopy(mine)
    lr = 0.05 if scale == "spectral" else 0.01
    ours = fxshard.Muon(lr=lr, weight_decay=0.1, scale=scale, nesterov=nesterov).build(
        [(f"{i}.weight", parameter) for i, parameter in enumerate(mine)]
    )
    torchs = torch.optim.Muon(theirs, lr=lr, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=ADJUST[scale])
    check_steps(ours, torchs, mine, theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(ours.state[one]["momentum_buffer"], torchs.state[other]["momentum_buffer"])


def test_groups_and_schedulers() -> None:
    model = Llama(TINY)
    model.norm.weight.requires_grad_(False)
    adamw = fxshard.AdamW(lr=1e-3, weight_decay=0.1, decay=lambda name, shape: len(shape) > 1)
    optimizer = fxshard.Muon(lr=0.02, adamw=adamw).build(model)
    assert [(g["kind"], g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
        ("muon", 0.02, 0.0, 7),
        ("adamw", 1e-3, 0.1, 2),
        ("adamw", 1e-3, 0.0, 2),
    ]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, [optimizer], 1)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 5e-4, 5e-4]


def test_missing_gradients_are_left_alone() -> None:
    model = Llama(TINY)
    optimizer = fxshard.Muon(weight_decay=0.1).build(model)
    model(tokens(0), tokens(1)).backward()
    skipped = model.layers[0].mlp.up.weight
    skipped.grad, before = None, skipped.detach().clone()
    optimizer.step()
    assert torch.equal(skipped, before) and not optimizer.state[skipped]


def test_empty_parameters_are_finite() -> None:
    model = torch.nn.Linear(6, 6)
    model.none = torch.nn.Parameter(torch.zeros(0, 4))
    optimizer = fxshard.Muon(lr=0.1).build(model)
    before = model.weight.detach().clone()
    (model(torch.ones(2, 6)).square().sum() + model.none.sum()).backward()
    optimizer.step()
    assert not torch.equal(model.weight, before) and optimizer.skipped_steps == 0


def test_resuming_is_as_if_never_stopped() -> None:
    model = Llama(TINY)
    optimizer = fxshard.Muon(weight_decay=0.01).build(model)
    train(model, [optimizer], 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, [optimizer], 2, start=2)
    again = Llama(TINY)
    again.load_state_dict(saved[0])
    resumed = fxshard.Muon(weight_decay=0.01).build(again)
    resumed.load_state_dict(saved[1])
    train(again, [resumed], 2, start=2)
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.shows("O11")
def test_the_iteration_is_part_of_the_checkpoint() -> None:
    model = Llama(TINY)
    saved = fxshard.Muon(coefficients="polar_express").build(model).state_dict()
    assert saved["param_groups"][0]["coefficients"] == "polar_express"
    with pytest.raises(
        fxshard.StateError, match="made with coefficients='polar_express', this optimizer has coefficients='quintic'"
    ):
        fxshard.Muon().build(model).load_state_dict(saved)
    with pytest.raises(fxshard.StateError, match="made with steps=5, this optimizer has steps=6"):
        fxshard.Muon(coefficients="polar_express", steps=6).build(model).load_state_dict(saved)
    with pytest.raises(fxshard.StateError, match="saved by another optimizer"):
        fxshard.Muon().build(model).load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


@pytest.mark.parametrize("where", ["layers.0.mlp.up.weight", "embed.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("nan", ["raise", "skip"])
def test_gradients_that_are_not_finite_change_nothing(nan: str, value: float, where: str) -> None:
    model = Llama(TINY)
    optimizer = fxshard.Muon(nan=nan, weight_decay=0.1).build(model)
    train(model, [optimizer], 1)
    model(tokens(1), tokens(2)).backward()
    dict(model.named_parameters())[where].grad.view(-1)[3] = value  # type: ignore[union-attr]
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    if nan == "raise":
        with pytest.raises(fxshard.StateError, match=f"gradients are not finite: {where}. Nothing was changed"):
            optimizer.step()
    else:
        with pytest.warns(RuntimeWarning, match=f"step skipped, gradients are not finite: {where}"):
            optimizer.step()
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()["state"]), before, rtol=0, atol=0)


def test_a_closure_gives_the_loss() -> None:
    model = Llama(TINY)
    optimizer = fxshard.Muon().build(model)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(tokens(0), tokens(1))
        loss.backward()
        return float(loss)

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert first is not None and second is not None and second < first


def test_the_form_is_used() -> None:
    parameter = torch.nn.Parameter(torch.zeros(24, 40))
    parameter.grad = torch.randn(24, 40)
    fxshard.Muon(lr=1.0, form="gram", scale=None, nesterov=False).build([("w.weight", parameter)]).step()
    assert torch.equal(-parameter, orthogonalize([0.05 * parameter.grad], form="gram")[0].float())
