"""``torch.compile(model, backend="fxshard")``, sharded and not."""

from __future__ import annotations

import copy
import warnings
from importlib.metadata import entry_points
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

import fxshard
from fxshard._torch import private
from fxshard.frontend.lowering.segments import SegmentCompiler
from tests.pool import Pool
from tests.stack import Stack, batch
from tests.toy import Mlp
from tests.training import EPS, Run, full_gradients, mean_over_ranks, sharded_run


def through_torch_compile() -> tuple[Run, Run]:
    sharded = fxshard.shard(Stack(), zero=3, optimizer=fxshard.AdamW(lr=1e-3, eps=EPS), lowering="eager")
    step = torch.compile(sharded, backend="fxshard")
    losses, grads = [], {}
    for i in range(3):
        loss = step(*batch(i, dist.get_rank()))
        loss.backward()
        losses.append(mean_over_ranks(loss))
        grads = full_gradients(sharded)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    assert "unshard" in str(sharded.schedule)  # the schedule is there whichever way the model was compiled
    return Run(losses, grads, sharded.full_state_dict()), sharded_run(Stack, zero=3, steps=3)


@pytest.mark.shows("E1")
def test_the_backend_is_found_by_name() -> None:
    assert "fxshard" in entry_points(group="torch_dynamo_backends").names
    torch.manual_seed(0)
    model = Mlp()
    x = torch.randn(3, 7)
    expected = model(x)
    compiled = torch.compile(copy.deepcopy(model), backend="fxshard", options={"lowering": "eager"})
    actual = compiled(x)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    assert all(parameter.grad is not None for parameter in compiled.parameters())


def test_torch_compile_around_a_step_that_calls_a_compiled_model() -> None:
    plain, sharded = Stack(), fxshard.compile(Stack(), optimizer=fxshard.AdamW(lr=1e-2, eps=EPS), lowering="eager")
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS, fused=True)

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(2.0 * x, y) / 4.0
        return loss

    around = torch.compile(step, backend="eager")
    for i in range(3):
        expected, found = step(plain, *batch(i, 0)), around(sharded, *batch(i, 0))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
        for loss, optimizer in ((expected, theirs), (found, sharded.optimizer)):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(torch.compile(sharded)(*batch(3, 0)), sharded(*batch(3, 0)))
    whole = torch.compile(lambda x, y: sharded(x, y), fullgraph=True)
    with pytest.raises(RuntimeError, match=r"fxshard.compile has compiled the model"):
        whole(*batch(3, 0))


def test_unsharded_model_lowers_through_inductor() -> None:
    torch.manual_seed(0)
    model = Mlp()
    x = torch.randn(3, 7)
    torch.testing.assert_close(torch.compile(copy.deepcopy(model), backend="fxshard")(x), model(x))


def test_shard_then_torch_compile_equals_compile(ranks: Pool) -> None:
    for mine, direct in ranks(2, through_torch_compile):
        assert mine.same(direct)


def test_options_are_checked() -> None:
    with pytest.raises(fxshard.FxshardError, match="unknown option"):
        try:
            torch.compile(Mlp(), backend="fxshard", options={"speed": 11})(torch.ones(2, 7))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise error.inner_exception from error


def test_a_lookup_alone_is_not_compiled() -> None:
    """With anything beside it, it is: there is something to fuse."""
    weight, tokens = torch.randn(8, 4), torch.tensor([3, 0, 7])
    alone = make_fx(lambda w, i: [torch.ops.aten.embedding(w, i)])(weight, tokens)
    scaled = make_fx(lambda w, i: [torch.ops.aten.embedding(w, i) * 2])(weight, tokens)
    with mock.patch.object(private, "inductor_compile") as compile:
        (found,) = SegmentCompiler("inductor")(alone)([weight, tokens])
        compile.assert_not_called()
        SegmentCompiler("inductor")(scaled)
        compile.assert_called_once()
    assert torch.equal(found, weight[tokens])


def not_sharded() -> tuple[int, int]:
    """How many warnings there are of a model that trains on each rank by itself, and of one that DDP takes care of."""
    found = []
    for wrap in (lambda model: model, DistributedDataParallel):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = wrap(torch.compile(Mlp(), backend="fxshard", options={"lowering": "eager"}))
            model(torch.ones(2, 7)).sum().backward()
            with torch.no_grad():
                model(torch.ones(2, 7))
        found.append(sum("no gradients are reduced" in str(warning.message) for warning in caught))
    return found[0], found[1]


def test_ranks_that_train_apart_are_warned_of(ranks: Pool) -> None:
    assert ranks(2, not_sharded) == [(1, 0)] * 2


def in_wrappers() -> None:
    with pytest.raises(fxshard.StateError, match="reduces its gradients itself"):
        DistributedDataParallel(fxshard.shard(Mlp()))
    with pytest.raises(fxshard.ConfigError, match="the model is a DistributedDataParallel"):
        fxshard.shard(DistributedDataParallel(Mlp()))
    model = torch.nn.Sequential(Mlp())
    fully_shard(model[0])
    with pytest.raises(fxshard.ConfigError, match="0 is a FSDPModule"):
        fxshard.shard(model)


def test_other_data_parallelism_is_refused(ranks: Pool) -> None:
    ranks(2, in_wrappers)


def test_modes_are_refused() -> None:
    with pytest.raises(Exception, match="modes are Inductor's") as refused:
        torch.compile(Mlp(), backend="fxshard", mode="max-autotune")(torch.ones(2, 7))
    assert isinstance(getattr(refused.value, "inner_exception", None), fxshard.ConfigError)
