"""On a GPU: the same numbers as plain PyTorch, nothing allocated in steady state, no hidden synchronisation."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from tests.gpu.waiting import no_waiting
from tests.training import step_both, with_debug

pytestmark = pytest.mark.gpu
SMALL = LlamaConfig(vocab=512, dim=256, layers=4, heads=4, hidden=704)
BF16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)


def pair(**options: object) -> tuple[fxshard.ShardedModule, Llama]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = Llama(SMALL)
    reference = copy.deepcopy(plain)
    return fxshard.compile(plain, optimizer=fxshard.AdamW(lr=1e-3), **options), reference  # type: ignore[arg-type]


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 512, (2, 128), generator=torch.Generator().manual_seed(step)).cuda()


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("zero", [0, 3])
def test_trains_like_the_plain_model(lowering: str, zero: int) -> None:
    model, reference = pair(zero=zero, lowering=lowering)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)
    for step in range(4):
        x = tokens(step)
        mine, theirs = step_both(model, reference, optimizer, x, x)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"overlap": False}, {"arena": False}, {"prefetch": 0}, {"keep_resident": False}])
def test_scheduling_options_change_nothing(options: dict[str, object]) -> None:
    results = []
    for chosen in ({}, options):
        model, _ = pair(precision=BF16, lowering="eager", **with_debug(chosen))
        for step in range(3):
            x = tokens(step)
            model(x, x).backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
        results.append(model.full_state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_layers_that_are_traced_once_compute_the_same(lowering: str) -> None:
    """One step: Inductor adds up the gradient of an embedding by atomic additions, whose order nobody knows."""
    left, events = [], []
    for once in (True, False):
        torch.manual_seed(0)
        with torch.device("cuda"):
            plain = Llama(dataclasses.replace(SMALL, layers=7))
        model = fxshard.compile(plain, precision=BF16, lowering=lowering, debug=fxshard.Debug(fold_layers=once))
        loss = model(tokens(0), tokens(0))
        loss.backward()
        grads = [parameter.grad for name, parameter in model.named_parameters() if "embed" not in name]
        left.append([loss, *grads])
        events.append([(event.kind, event.bucket, event.phase) for event in model.schedule.events])
        assert model.report.compilations.layers_folded == (2 if once else 0)
    assert events[0] == events[1]
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def test_accumulation_adds_up() -> None:
    model, reference = pair(lowering="eager")
    for step in range(3):
        x = tokens(step)
        model(x, x).backward()
        reference(x, x).backward()
    grads = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(grads[name].grad, parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_step_synchronises_nowhere() -> None:
    model, _ = pair(precision=BF16)
    x = tokens(0)

    def step() -> None:
        model(x, x).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()

    for _ in range(2):
        step()
    with no_waiting():
        step()


def test_gradient_products_are_written_in_the_wider_dtype() -> None:
    model, _ = pair(precision=BF16)
    x = tokens(0)
    model(x, x).backward()
    assert "mm_into" in str(model.graphs["backward"].graph)
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}
