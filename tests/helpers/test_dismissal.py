"""When a crew goes: as soon as nothing is left to compile, or to be held up by its going, and whatever fails."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch

import fxshard
from fxshard.helpers import crew
from fxshard.lowering import SegmentCompiler
from fxshard.programs import Programs
from tests.toy import Mlp

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def helpers(made: mock.Mock) -> mock.Mock:
    """A crew of which nobody has come yet."""
    crew.hire()
    hired = crew.hired()
    assert isinstance(hired, mock.Mock)
    hired.present.return_value = 0
    hired.open = set()
    return hired


def loss_of(model: fxshard.ShardedModule) -> torch.Tensor:
    return model(torch.randn(4, 7), torch.randn(4, 5))  # type: ignore[no-any-return]


@pytest.mark.parametrize("training", [True, False])
def test_nobody_is_left_when_a_first_graph_is_compiled(helpers: mock.Mock, training: bool) -> None:
    """Also where there was nothing for them to do."""
    model = fxshard.compile(Mlp(), lowering="eager")
    with torch.set_grad_enabled(training):
        loss_of(model)
    helpers.dismiss.assert_called_once_with()
    assert crew.hired() is None


@pytest.mark.parametrize("again", ["backward", "forward"])
def test_nobody_is_left_when_backward_runs_or_cannot_be_meant_to(helpers: mock.Mock, again: str) -> None:
    """They may be at work for backward while forward runs for the first time, not longer."""
    model = fxshard.compile(Mlp(), lowering="inductor")
    with mock.patch.object(SegmentCompiler, "hand_out"):
        loss = loss_of(model)
        helpers.dismiss.assert_not_called()
        loss.backward() if again == "backward" else loss_of(model)
    helpers.dismiss.assert_called_once_with()
    assert crew.hired() is None


@pytest.mark.parametrize("room", [True, False])
def test_who_is_in_nobodys_way_stays_until_the_optimizer_has_stepped(helpers: mock.Mock, room: bool) -> None:
    model = fxshard.compile(Mlp(), optimizer=fxshard.AdamW(), lowering="inductor")
    staying = mock.patch.object(Programs, "_may_stay", return_value=room)
    with mock.patch.object(SegmentCompiler, "hand_out") as handed_out, staying:
        loss_of(model).backward()
    assert helpers.dismiss.called is not room
    phases = handed_out.call_args.args[1]
    assert len(phases) == 2 and all(phases), "forward's, then backward's"
    model.optimizer.step()
    helpers.dismiss.assert_called_once_with()
    assert crew.hired() is None


def test_who_stayed_goes_when_the_model_does(helpers: mock.Mock) -> None:
    model = fxshard.compile(Mlp(), optimizer=fxshard.AdamW(), lowering="inductor")
    with mock.patch.object(SegmentCompiler, "hand_out"), mock.patch.object(Programs, "_may_stay", return_value=True):
        loss_of(model).backward()
    helpers.dismiss.assert_not_called()
    del model
    torch._dynamo.reset()
    gc.collect()
    helpers.dismiss.assert_called_once_with()


def test_nobody_stays_for_an_evaluation(helpers: mock.Mock) -> None:
    model = fxshard.compile(Mlp(), optimizer=fxshard.AdamW(), lowering="inductor")
    staying = mock.patch.object(Programs, "_may_stay", return_value=True)
    with mock.patch.object(SegmentCompiler, "hand_out"), staying, torch.no_grad():
        loss_of(model)
    helpers.dismiss.assert_called_once_with()


@pytest.mark.parametrize(
    ("device", "own", "free", "stays"),
    [("cuda", True, 101, True), ("cuda", True, 100, False), ("cuda", False, 101, False), ("cpu", True, 101, False)],
)
def test_who_stays_takes_no_memory_that_is_wanted(device: str, own: bool, free: int, stays: bool) -> None:
    """And only where an optimizer of ours will say when to go, and there are CUDA contexts to be taken down."""
    engine = mock.Mock(device=torch.device(device))
    programs = Programs(mock.Mock(own_optimizer=own, engine=engine), mock.Mock(splits={}), mock.Mock())
    with (
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(free, 1000)),
        mock.patch.object(torch.cuda, "memory_allocated", return_value=100),
    ):
        assert programs._may_stay() is stays


def test_nobody_is_left_when_a_model_cannot_be_captured(helpers: mock.Mock) -> None:
    model = fxshard.compile(torch.nn.Linear(3, 3), lowering="inductor")
    with pytest.raises(fxshard.FxshardError):
        model(torch.ones(2, 5))
    helpers.dismiss.assert_called_once_with()


def test_nobody_is_left_when_compilation_fails(helpers: mock.Mock) -> None:
    model = fxshard.compile(Mlp(), lowering="inductor")
    failing = mock.patch.object(SegmentCompiler, "hand_out", side_effect=RuntimeError("no such kernel"))
    with failing, pytest.raises(fxshard.FxshardError, match="no such kernel"):
        loss_of(model)
    helpers.dismiss.assert_called_once_with()
