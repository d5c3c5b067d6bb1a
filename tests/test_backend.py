"""``torch.compile(model, backend="fxshard")``, sharded and not."""

from __future__ import annotations

import copy
from importlib.metadata import entry_points
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxshard
from fxshard._torch import private
from fxshard.frontend.lowering.segments import SegmentCompiler
from tests.pool import Pool
from tests.thorough import thorough
from tests.toy import Llama, Mlp
from tests.training import EPS, Run, llama, sharded_run, this_ranks_batch, train


def through_torch_compile() -> tuple[Run, Run]:
    sharded = fxshard.shard(llama(), zero=3, optimizer=fxshard.AdamW(lr=1e-3, eps=EPS), lowering="eager")
    step = torch.compile(sharded, backend="fxshard")
    losses = []
    for i in range(3):
        loss = step(*this_ranks_batch(i))
        loss.backward()
        losses.append(float(loss.detach()))
        if i < 2:
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
    del losses
    sharded.optimizer.step()
    assert "unshard" in str(sharded.schedule)  # the schedule is there whichever way the model was compiled
    mine = Run([], {}, sharded.full_state_dict())
    direct = sharded_run(zero=3, steps=3)
    return mine, Run([], {}, direct.params)


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


def test_repeated_layers_compile_once() -> None:
    """The number of compilations does not grow with depth."""
    counts = {}
    for layers in (3, 6):
        torch.manual_seed(0)
        model = fxshard.compile(Llama(vocab=96, dim=32, layers=layers, heads=4, hidden=88), lowering="eager")
        x = torch.randint(0, 96, (2, 8))
        model(x, x).backward()
        assert model.report.compilations.captures == 1
        counts[layers] = (model.report.compilations.segments, model.report.compilations.compiled)
    assert counts[6][0] > counts[3][0]
    assert counts[6][1] == counts[3][1]


def both_ways(zero: int) -> list[float]:
    """Evaluation between training steps disturbs nothing."""
    model = fxshard.compile(llama(), zero=zero, optimizer=fxshard.AdamW(lr=1e-3), lowering="eager")
    losses = []
    for step in range(3):
        loss = model(*this_ranks_batch(step))
        if step == 1:
            with torch.no_grad():  # between a forward and its backward: what forward kept must be gathered again
                model(*this_ranks_batch(7))
        loss.backward()
        with torch.no_grad():
            losses.append(float(model(*this_ranks_batch(9))))
        model.optimizer.step()
        model.optimizer.zero_grad()
    return [*losses, *[float(value.sum()) for value in model.full_state_dict().values()]]


def straight(zero: int) -> list[float]:
    model = fxshard.compile(llama(), zero=zero, optimizer=fxshard.AdamW(lr=1e-3), lowering="eager")
    run = train(model, model.optimizer, 3)
    return [float(value.sum()) for value in run.params.values()]


def interleaved(zero: int) -> bool:
    return both_ways(zero)[3:] == straight(zero)


@pytest.mark.parametrize("zero", [thorough(2), thorough(3)])
def test_evaluation_between_steps_disturbs_nothing(ranks: Pool, zero: int) -> None:
    assert ranks(2, interleaved, zero) == [True, True]


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
