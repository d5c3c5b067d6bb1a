"""Captured programs: replayed where everything is as it was, run through where it is not, and always right."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxshard
from fxshard.frontend.lowering import programs
from fxshard.frontend.lowering.programs import changes_on_host
from fxshard.runtime import replay
from fxshard.runtime.replay import Replays
from tests.faketape import FakeTape
from tests.precision.nets import VOCAB, single
from tests.replaying import (
    SCENARIOS,
    Act,
    Pair,
    accumulated,
    both,
    cleared_by_hand,
    counts,
    finish,
    reasons,
    replaced,
    same,
    step,
)
from tests.stack import Stack, batch, deep
from tests.test_unused_gradients import ONE_UNIT, Results
from tests.thorough import thorough
from tests.toy import batch as tokens
from tests.training import llama, train_step

BF16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)


def pair(make: Callable[[], nn.Module] = Stack, **options: Any) -> Pair:
    """The same model with and without captured programs."""
    models = []
    for _ in range(2):
        given = {"lowering": "eager", "optimizer": fxshard.AdamW(lr=1e-2), **options}
        models.append(fxshard.compile(make(), **given))
    buckets = [weakref.ref(bucket) for bucket in models[0]._sharding.buckets]

    def protected() -> list[torch.Tensor]:
        """Gradients, at home or not: what is alive when something is captured is not the capture's memory. On a CPU the
        allocator may later give the same bytes to the pool.
        """
        homes = [home.memory for bucket in buckets if (home := bucket().home) is not None]
        return homes + [grad for bucket in buckets if (grad := bucket().grad) is not None]

    models[0]._sharding.engine.replays = Replays(FakeTape(protected))
    return models[0], models[1]


def test_without_its_graphs_a_model_goes_on() -> None:
    """Not while a backward is still to come, whose activations lie in their memory."""
    models = pair(precision=BF16)
    for number in range(3):
        both(models, step(number))
    loss = models[0](*batch(3, 0))
    with pytest.raises(fxshard.StateError, match="a backward still needs"):
        models[0].delete_cuda_graphs()
    del loss
    captured = counts(models[0])
    assert captured[0] == 2 and captured[1] >= 2
    models[0].delete_cuda_graphs()
    for number in range(3, 6):
        both(models, step(number))
    assert counts(models[0]) == captured and reasons(models[0])["delete_cuda_graphs was called"] == 6
    assert same(models)


@pytest.mark.shows("F7")
def test_float8_weights_are_scaled_and_quantized_in_every_replay() -> None:
    models = pair(single, precision=fxshard.Float8(smallest=0))
    for number in range(5):
        losses = []
        for model in models:
            losses.append(float(train_step(model, *tokens(number, 1, 0, VOCAB, size=2, length=8))))
        assert losses[0] == losses[1]
    assert counts(models[0]) == (2, 6)
    assert same(models)


def test_gradients_that_are_left_out_are_left_out_of_replays() -> None:
    """Heads in turn, and two heads in one step: a take belongs to one choice."""
    models = pair(Results, optimizer=fxshard.AdamW(lr=1e-2, weight_decay=0.1), units=ONE_UNIT)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    missing = []

    def act(model: fxshard.ShardedModule, chosen: tuple[int, ...]) -> list[torch.Tensor]:
        losses = []
        for which in chosen:
            losses.append(model(x, which)[which])
            losses[-1].backward()
        missing.append([name for name, p in model.named_parameters() if p.grad is None])
        return [loss.detach() for loss in losses] + finish(model)

    for chosen in [(0,), (0,), (1,), (0,), (1,), (0, 1), (1, 0), (0, 1), (0, 0), (0,), (1,)]:
        both(models, act, chosen)
        assert missing[-1] == missing[-2] and ("heads.1.weight" in missing[-1]) == (1 not in chosen)
    assert same(models) and counts(models[0])[1] >= 6


@pytest.mark.thorough
def test_a_transformer_trains_the_same() -> None:
    models = pair(lambda: llama(layers=1), optimizer=fxshard.Muon(lr=1e-2))
    x = torch.randint(0, 96, (4, 2, 16), generator=torch.Generator().manual_seed(0))
    losses = []

    def act(model: fxshard.ShardedModule, i: int) -> list[torch.Tensor]:
        loss = model(x[i], x[i])
        loss.backward()
        norm = model.clip_grad_norm_(0.1)
        model.optimizer.step()
        model.optimizer.zero_grad()
        losses.append((loss, float(loss.detach())))
        return [loss.detach(), norm]

    for i in range(4):
        both(models, act, i)
    assert counts(models[0]) == (2, 4) and same(models)
    assert all(float(loss.detach()) == then for loss, then in losses), "a loss that was kept has changed"


def offloading() -> dict[str, Any]:
    """Options with which activations of a deep stack go to the host."""
    with pytest.raises(fxshard.BudgetError) as caught:
        optimizer, settings = fxshard.AdamW(lr=1e-2), {"activations": "offload", "lowering": "eager"}
        fxshard.plan(deep(), batch(0, 0), world_size=1, memory_budget=1, optimizer=optimizer, **settings)
    return {"memory_budget": caught.value.smallest, "activations": "offload"}


@pytest.mark.parametrize("options", [thorough(dict), pytest.param(offloading, marks=pytest.mark.shows("M4"))])
def test_whatever_needs_memory_that_a_replay_would_overwrite_is_right(options: Callable[[], dict[str, Any]]) -> None:
    """Each of these comes after two steps, which were captured, and is followed by two that must be right too."""
    models = pair(deep, **options())
    for number in range(3):
        both(models, step(number))
    assert bool(models[0].schedule.offloaded) == (options is offloading)
    for again in range(2):
        for kind in SCENARIOS:
            before = counts(models[0])
            both(models, kind)
            both(models, step(30 + again))
            both(models, step(31 + again))
            assert counts(models[0]) > before, f"nothing was captured or replayed around {kind.__name__}"
    assert same(models)
    assert counts(models[0])[0] <= 4 * replay.CAPTURES
    assert {
        "activations of an earlier forward are still needed",
        "autograd keeps the activations (retain_graph)",
        "its forward ran through",
        "gradients of an earlier step are still held",
    } <= reasons(models[0]).keys()


def test_backward_is_captured_behind_a_capture_of_its_forward_only() -> None:
    """Behind a replay the allocator takes the memory of activations for free. Nor may gradients be written there."""
    models = pair()
    both(models, step(0))

    def retaining(model: fxshard.ShardedModule) -> list[torch.Tensor]:
        loss = model(*batch(1, 0))
        loss.backward(retain_graph=True)
        return [loss.detach(), *finish(model)]

    both(models, retaining)  # forward is captured here, backward is not
    assert counts(models[0]) == (1, 0)
    for _ in range(2):  # forward is replayed, to no avail
        both(models, step(1))
    assert counts(models[0]) == (1, 2)
    assert reasons(models[0])["its forward was replayed, and nothing captured fits"] == 2
    both(models, step(2))  # both are captured
    both(models, step(3))
    assert counts(models[0]) == (3, 4)

    def away_from_home(model: fxshard.ShardedModule) -> list[torch.Tensor]:
        loss = model(*batch(4, 0))
        some = next(model.parameters())
        some.grad = torch.ones_like(some)
        loss.backward()
        homes = [bucket for bucket in model._sharding.buckets if bucket.home is not None]
        assert not any(bucket.grad.data_ptr() == bucket.home.memory.data_ptr() for bucket in homes)
        return [loss.detach(), *finish(model)]

    both(models, away_from_home)
    both(models, step(5))
    assert same(models)


def test_a_take_belongs_to_what_was_gathered_before() -> None:
    models = pair(precision=BF16, zero=2)

    def without_update(model: fxshard.ShardedModule) -> list[torch.Tensor]:
        loss = model(*batch(0, 0))
        loss.backward()
        model.optimizer.zero_grad()
        return [loss.detach()]

    for _ in range(3):
        both(models, without_update)
    assert counts(models[0]) == (2, 2)
    for number in range(4):  # captured where nothing had to be gathered, these must gather
        both(models, step(number))
    both(models, without_update)
    models[0](*batch(9, 0))
    assert not any(bucket.stale for bucket in models[0]._sharding.buckets), "a replay gathers, too"
    assert same(models) and counts(models[0])[0] == 4


@pytest.mark.parametrize("how", ["no_sync", thorough("zeroed")])
def test_accumulation_is_captured_too(how: str) -> None:
    models = pair()
    for number in range(5):
        both(models, accumulated, number, how)
    before = counts(models[0])
    both(models, accumulated, 9, how)
    assert counts(models[0]) == (before[0], before[1] + 6), "a step of three micro-batches is replayed as a whole"
    assert same(models)


def test_nothing_keeps_a_model_that_is_dropped() -> None:
    models = pair()
    for number in range(3):
        both(models, step(number))
    models[0](*batch(0, 0))  # never differentiated
    dies = [weakref.ref(models[0]._sharding.engine), *map(weakref.ref, models[0]._sharding.buckets)]
    del models
    torch._dynamo.reset()
    gc.collect()
    assert not any(reference() for reference in dies)


class Normed(nn.Module):
    """Forward writes to buffers, and returns more than a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.norm = nn.Linear(7, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.norm(self.lin(x))
        return F.mse_loss(out, y), out


@pytest.mark.parametrize("dynamic", [False, None])
def test_buffers_shapes_and_results_that_are_kept(dynamic: bool | None) -> None:
    models = pair(Normed, dynamic=dynamic)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def act(model: fxshard.ShardedModule, number: int, rows: int) -> list[torch.Tensor]:
        x, y = (value[:rows] for value in batch(number, 0))
        loss, out = model(x, y)
        loss.backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        kept.append((out, out.detach().clone()))
        return [loss.detach(), out.detach()]

    for number in range(12):
        both(models, act, number, 6 if number % 3 else 4)
    assert same(models)
    assert all(torch.equal(now.detach(), then) for now, then in kept)
    if dynamic is False:
        assert counts(models[0])[1] >= 12
    else:  # from the second shape on sizes are symbols
        assert reasons(models[0])["an input is no tensor on the device"] >= 5


def test_a_gradient_that_is_kept_is_safe_from_takes_older_than_its_place() -> None:
    """They knew a gradient elsewhere, where the next one may come to lie again, and nothing of this place."""
    models = pair()
    for number in range(3):
        both(models, step(number))
    for model in models:
        step(3)(model)
        model(*batch(4, 0)).backward()
    old = [(p.grad, p.grad.clone()) for p in models[0].parameters() if p.grad is not None]
    assert all(bucket.home is not None and not bucket.home.free for bucket in models[0]._sharding.buckets)
    for model in models:
        finish(model)
        model(*batch(5, 0)).backward()
    why = "gradients of an earlier step are still held"
    before = reasons(models[0])[why]
    both(models, step(6))  # adds to gradients that are not at home
    assert reasons(models[0])[why] == before + 1
    assert all(torch.equal(now, then) for now, then in old) and same(models)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.lin(x) * mask).square().mean()


def test_inputs_that_were_expanded() -> None:
    models = pair(Masked)

    def act(model: fxshard.ShardedModule, number: int) -> list[torch.Tensor]:
        x, y = batch(number, 0)
        loss = model(x, y[:, :1].expand(6, 5))
        loss.backward()
        return [loss.detach(), *finish(model)]

    for number in range(4):
        both(models, act, number)
    assert counts(models[0]) == (2, 4) and same(models)


@pytest.mark.parametrize("kind", [thorough(cleared_by_hand), replaced])
def test_gradients_may_be_cleared_or_replaced_at_any_time(kind: Act) -> None:
    """A backward that adds to gradients is no replay of one that does not; and forward never touches them."""
    models = pair()
    for _ in range(2):
        both(models, kind)
    assert counts(models[0])[1] and same(models)


def test_what_is_drawn_on_the_host_is_drawn_each_time() -> None:
    """A kernel would be captured with the number that it was given; here the model is on ``meta``."""
    own, aten = torch.device("meta"), torch.ops.aten

    def found(*calls: tuple[Any, *tuple[str, ...]]) -> bool:
        graph = torch.fx.Graph()
        graph.placeholder("x").meta["val"] = torch.empty(2, device=own)
        (x,) = graph.nodes
        for target, *devices in calls:
            args = ([2],) if target in (aten.rand.default, aten.ones.default) else (x,)
            node = graph.call_function(target, args)
            node.meta["val"] = tuple(torch.empty(2, device=device) for device in devices)
        graph.output((x,))
        inner = torch.fx.GraphModule({}, graph)
        outer = torch.fx.Graph()
        outer.output(outer.call_module("segment", (outer.placeholder("x"),)))
        return changes_on_host(torch.fx.GraphModule({"segment": inner}, outer), own)

    assert found((aten.rand.default, "cpu")) and found((aten._to_copy.default, "cpu"))
    assert not found((aten.rand.default, "meta"), (aten.ones.default, "cpu"), (aten._to_copy.default, "meta"))
    assert not found((aten._scaled_dot_product_efficient_attention.default, "meta", "cpu")), "it runs on the device"

    with mock.patch.object(programs, "changes_on_host", lambda *_: True):
        models = pair()
        for number in range(3):
            both(models, step(number))
    assert counts(models[0]) == (0, 0)
    assert "it draws random numbers on the host, or copies to it" in reasons(models[0])


class _Failing(FakeTape):
    fails = False

    def record(self, run: Callable[[], Any]) -> Any:
        if not self.fails:
            return super().record(run)

        def broken() -> None:
            run()
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

        return super().record(broken)


def test_what_cannot_be_captured_is_named_and_leaves_nothing_behind() -> None:
    models = pair(precision=BF16)
    replays = models[0]._sharding.engine.replays
    assert replays is not None
    tape = replays._tape = _Failing()
    both(models, step(0))
    tape.fails = True
    with pytest.raises(fxshard.CaptureError, match=r"forward could not be captured.*\n.*without cuda_graphs"):
        models[0](*batch(1, 0))
    tape.fails = False
    loss = models[0](*batch(1, 0))
    tape.fails = True
    with pytest.raises(fxshard.CaptureError, match="backward could not be captured"):
        loss.backward()
    assert all(parameter.grad is None for parameter in models[0].parameters())
    tape.taken = True
    both(models, step(1))
    assert "another capture is under way" in reasons(models[0])
    tape.taken, tape.fails = False, False
    for number in range(2, 5):
        both(models, step(number))
    assert same(models) and replays.replayed


def test_profiles_and_endless_captures_run_through(monkeypatch: pytest.MonkeyPatch) -> None:
    models = pair()
    for number in range(3):
        both(models, step(number))
    before = counts(models[0])
    for model in models:
        with model.profile(steps=1) as profile:
            step(3)(model)
        assert profile.seconds
    assert counts(models[0]) == before and same(models)
    monkeypatch.setattr(replay, "CAPTURES", 1)
    both(models, step(4, micro=2))
    both(models, step(5, micro=2))
    assert counts(models[0])[0] == before[0]
    assert "it was captured 1 times" in reasons(models[0])
    assert same(models)


@pytest.mark.parametrize(
    ("options", "said"), [({}, "the model is on 'cpu'"), ({"fullgraph": False}, "needs the whole model in one graph")]
)
def test_is_refused_where_it_cannot_work(options: dict[str, Any], said: str) -> None:
    plain = Stack()
    before = copy.deepcopy(plain.state_dict())
    with pytest.raises(fxshard.ConfigError, match=said):
        fxshard.compile(plain, cuda_graphs=True, **options)
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())
