"""Where the host does not wait for the verdict on gradients, a refused step changes no bit and is reported later."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import fxshard
from fxshard.optim import muon_rule as rule
from tests.optim.late import known_late
from tests.test_muon import SPLIT, Fused, fused
from tests.training import deliver, random_gradients

ADAMW = SPLIT.adamw
IN_GROUPS = {"*.qkv.weight": fxshard.Split((12, 4, 4), groups=2)}  # whose pieces are copies
BAD = "blocks.1.o.weight"


@pytest.fixture
def late() -> Iterator[None]:
    with known_late():
        yield


def choice(nan: str = "raise") -> fxshard.Muon:
    return fxshard.Muon(lr=2e-2, weight_decay=0.1, adamw=ADAMW, split=IN_GROUPS, nan=nan)


def gradients(step: int, bad: bool = False) -> dict[str, torch.Tensor]:
    grads = {name: grad for name, grad in random_gradients(Fused(), step).items() if "unused" not in name}
    if bad:
        grads[BAD].view(-1)[3] = math.nan
        grads["head.bias"][0] = math.inf
    return grads


class Plain:
    """An optimizer over plain tensors, or over shards, that is given gradients."""

    def __init__(self, nan: str = "raise") -> None:
        self.model: Any = fused()
        self.optimizer: Any = choice(nan).build(self.model)

    def step(self, step: int, bad: bool = False, only: str = "") -> None:
        self.optimizer.zero_grad()
        self.deliver({name: grad for name, grad in gradients(step, bad).items() if only in name})
        self.optimizer.step()

    def deliver(self, grads: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = grads.get(name)

    def everything(self) -> list[torch.Tensor]:
        """Parameters and state, without asking the optimizer for it."""
        state = self.optimizer.state
        held = [state[p][field] for p in self.model.parameters() if p in state for field in sorted(state[p])]
        local = [t.to_local() if isinstance(t, dist.tensor.DTensor) else t for t in (*self.model.parameters(), *held)]
        return [tensor.detach().clone() for tensor in local]


class Sharded(Plain):
    def __init__(self, nan: str = "raise") -> None:
        self.model = fxshard.shard(fused(), optimizer=choice(nan))
        self.optimizer = self.model.optimizer

    def deliver(self, grads: dict[str, torch.Tensor]) -> None:
        deliver(self.model, grads)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


KINDS = pytest.mark.parametrize("kind", [Plain, Sharded])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_rule_writes_what_it_is_allowed_to(nesterov: bool, dtype: torch.dtype) -> None:
    def tensors(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [torch.randn(shape).to(dtype) for shape in [(5, 7), (33,), (2, 3, 4)]]

    def moved(refused: torch.Tensor | None, bad: float = 0.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        grads, momenta, params = tensors(0), tensors(1), tensors(2)
        for given in (*momenta, *params):
            given.view(-1)[0] = -0.0
        grads[1][4] += bad
        updates = rule.momentum_(grads, momenta, 0.9, nesterov, refused)
        directions = [update.float() for update in updates]
        rule.apply_(params, directions, 0.1, 0.2, [1.0, 2.0, 1.0], refused)
        return [*momenta, *params], updates

    plain, allowed = moved(None), moved(torch.tensor(0.0))
    assert same(plain[0], allowed[0]) and same(plain[1], allowed[1])
    kept, _ = moved(torch.tensor(1.0), math.nan)
    before = [*tensors(1), *tensors(2)]
    for tensor in before:
        tensor.view(-1)[0] = -0.0
    assert same([tensor.view(torch.uint8) for tensor in kept], [tensor.view(torch.uint8) for tensor in before])


@KINDS
def test_finite_gradients_give_the_same_bits(kind: type[Plain]) -> None:
    at_once, late = kind(), kind()
    for step in range(3):
        at_once.step(step)
    with known_late():
        for step in range(3):
            late.step(step)
    assert late.optimizer._verdicts.refused is not None  # the kernels did look
    assert same(late.everything(), at_once.everything())
    assert late.optimizer.skipped_steps == 0


@KINDS
def test_skip_leaves_everything_and_says_so_later(kind: type[Plain], late: None) -> None:
    run, reference = kind("skip"), kind("skip")
    run.step(0)
    reference.step(0)
    before = run.everything()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(1, bad=True)
    assert same(run.everything(), before)
    with pytest.warns(RuntimeWarning, match=rf"call 2 of step\(\): .*{BAD}.*; that step was skipped"):
        run.step(2)
    reference.step(2)
    assert same(run.everything(), reference.everything())
    assert run.optimizer.skipped_steps == 1


@KINDS
def test_raise_raises_at_the_next_step(kind: type[Plain], late: None) -> None:
    run, reference = kind(), kind()
    run.step(0)
    reference.step(0)
    before = run.everything()
    run.step(1, bad=True)
    with pytest.raises(fxshard.StateError, match=rf"in call 2 of step\(\): .*{BAD}.* changed nothing"):
        run.step(2)
    assert same(run.everything(), before)
    run.optimizer.step()  # it has been said: the gradients of this step are fine
    reference.step(2)
    assert same(run.everything(), reference.everything())


@KINDS
def test_reading_the_state_says_it_too(kind: type[Plain], late: None) -> None:
    run = kind()
    run.step(0)
    saved = run.optimizer.state_dict()
    run.step(1, bad=True)
    with pytest.raises(fxshard.StateError, match="call 2"):
        run.optimizer.state_dict()
    run.step(1, bad=True)
    with pytest.raises(fxshard.StateError, match="call 3"):
        _ = run.optimizer.skipped_steps
    assert run.optimizer.skipped_steps == 2
    run.step(1, bad=True)
    with pytest.warns(RuntimeWarning, match="call 4"):  # what would have been spoilt is replaced
        run.optimizer.load_state_dict(saved)
    run.step(2)
    assert all(bool(tensor.isfinite().all()) for tensor in run.everything())


def test_nothing_is_saved_before_it_is_said(tmp_path: Path, late: None) -> None:
    run = Sharded()
    run.step(0, bad=True)
    with pytest.raises(fxshard.FxshardError, match="not finite in call 1"):
        fxshard.save(run.model, tmp_path / "a")
    fxshard.save(run.model, tmp_path / "a")
    run.step(1, bad=True)
    with pytest.warns(RuntimeWarning, match="call 2"):
        fxshard.load(run.model, tmp_path / "a")


def test_a_refused_step_is_not_counted(late: None) -> None:
    """Neighbours with equal counts are updated as one, so the counts of the host must be those of the device."""
    run, reference = Sharded("skip"), Sharded("skip")
    for one in (run, reference):
        one.step(0)
    run.step(1, bad=True, only="o.")
    with pytest.warns(RuntimeWarning):
        run.step(2, only="qkv.")
    reference.step(2, only="qkv.")
    for one in (run, reference):
        one.step(3)
        for moments in one.optimizer._moments.values():
            assert moments.counts == moments.steps.tolist()
    assert same(run.everything(), reference.everything())


def test_a_step_reads_nothing_and_sends_nothing(late: None) -> None:
    """On a GPU each of these would make the host wait: numbers read, lists as indices, tensors made of lists."""
    run = Sharded()
    run.step(0)
    deliver(run.model, gradients(1))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run.optimizer.step()
    # Called by the optimizer, not by other operators: fused AdamW for the CPU reads step counts itself.
    called = {event.key for event in found.events() or () if getattr(event.cpu_parent, "key", "")[:6] != "aten::"}
    assert "aten::addcmul_" in called  # the step counts of AdamW's parameters
    assert not called & {f"aten::{name}" for name in ("item", "is_nonzero", "index", "index_put_", "lift_fresh")}
