"""AdamW on a GPU: gradients that are not finite change nothing, groups are torch's, and the host waits for nothing."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import fxshard
from tests.gpu.waiting import no_waiting
from tests.stack import Stack
from tests.training import deliver, random_gradients

pytestmark = pytest.mark.gpu


def gradients(seed: int, bad: bool = False) -> dict[str, torch.Tensor]:
    grads = {name: grad.cuda() for name, grad in random_gradients(Stack(), seed).items()}
    if bad:
        grads["layers.1.weight"].view(-1)[3] = math.nan
    return grads


def torchs(seeds: list[int], **options: float) -> dict[str, torch.Tensor]:
    plain = Stack().cuda()
    head = list(plain.head.parameters())
    rest = list(plain.layers.parameters())
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": head, **options}], lr=1e-2, fused=True)
    for seed in seeds:
        for name, grad in gradients(seed).items():
            plain.get_parameter(name).grad = grad
        optimizer.step()
    return {name: value.cpu() for name, value in plain.state_dict().items()}


@pytest.mark.shows("X6")
@pytest.mark.parametrize("nan", ["raise", "skip"])
def test_a_refused_step_changes_nothing_and_is_reported_by_the_next(nan: str) -> None:
    model = fxshard.shard(Stack().cuda(), optimizer=fxshard.AdamW(lr=1e-2, nan=nan))
    deliver(model, gradients(0))
    model.optimizer.step()
    before = model.full_state_dict()
    deliver(model, gradients(1, bad=True))
    with warnings.catch_warnings(), no_waiting():
        warnings.simplefilter("error")
        model.optimizer.step()
    after = model.full_state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    deliver(model, gradients(2))
    if nan == "raise":
        with pytest.raises(fxshard.StateError, match=r"call 2 of step\(\): layers\.1\.weight"):
            model.optimizer.step()
        model.optimizer.step()
    else:
        with pytest.warns(RuntimeWarning, match="was skipped"):
            model.optimizer.step()
    expected = torchs([0, 2])
    assert all(torch.equal(value, expected[name]) for name, value in model.full_state_dict().items())
    assert model.optimizer.skipped_steps == 1


@pytest.mark.parametrize("nan", [None, "raise"])
def test_groups_are_torchs_and_nothing_waits(nan: str | None) -> None:
    choice = fxshard.AdamW(lr=1e-2, nan=nan, groups={"head.*": {"lr": 1e-3, "weight_decay": 0.5}})
    model = fxshard.shard(Stack().cuda(), optimizer=choice)
    for seed in range(3):
        deliver(model, gradients(seed))
        if seed:  # the first one sends tables to the device
            with no_waiting():
                model.optimizer.step()
        else:
            model.optimizer.step()
    expected = torchs([0, 1, 2], lr=1e-3, weight_decay=0.5)
    assert all(torch.equal(value, expected[name]) for name, value in model.full_state_dict().items())


def test_norms_and_averages_wait_for_nothing() -> None:
    model = fxshard.shard(Stack().cuda(), optimizer=fxshard.AdamW(lr=1e-2))
    ema = fxshard.EMA(model, 0.9)
    deliver(model, gradients(0))
    with no_waiting():
        norms = model.norms()
        model.optimizer.step()
        ema.update()
    expected = random_gradients(Stack(), 0)
    for name, grad in expected.items():
        assert norms[name].item() == pytest.approx(grad.norm().item(), rel=1e-5)
