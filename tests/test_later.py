"""Programs that are made when they first run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard import _compat
from fxshard.runtime import later as module
from fxshard.runtime.later import later
from tests.toy import Mlp


def test_it_is_made_once_and_takes_its_arguments_in_a_list() -> None:
    make = mock.Mock(return_value=lambda args: [args.pop() * 2])
    run = later(make, "the forward graph")
    make.assert_not_called()
    with mock.patch.object(module.first_step, "taken") as taken:
        args = [3]
        assert run(args) == [6] and args == []
        taken.assert_not_called()
        assert run([4]) == [8]
        taken.assert_called_once_with()
    make.assert_called_once_with()
    assert run._boxed_call


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a mode of the user's reaches the compiler")


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a mode of the user's reaches the compiler")


@pytest.mark.parametrize(
    "entered",
    [
        Functions,
        Dispatches,
        torch.inference_mode,
        torch.enable_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
    ],
)
def test_it_is_made_as_if_nobody_ran_a_model(entered: Callable[[], Any]) -> None:
    def make() -> Callable[[list[Any]], Any]:
        made = torch.ones(2, 2) @ torch.ones(2, 2)
        assert made.dtype == torch.float32 and made.device.type == "cpu"
        assert not made.is_inference() and not torch.is_grad_enabled()
        return lambda args: None

    with entered():
        later(make, "it")([])


def test_what_cannot_be_compiled_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(segment: Any, inputs: Any) -> Any:
        raise ZeroDivisionError("no such kernel")

    monkeypatch.setattr(_compat, "inductor_compile", broken)
    model = fxshard.compile(Mlp(), lowering="inductor")
    with pytest.raises(
        fxshard.CaptureError, match=r"forward graph .* could not be compiled: ZeroDivisionError: no such"
    ):
        model(torch.randn(4, 7), torch.randn(4, 5))


def test_errors_of_ours_stay_what_they_are() -> None:
    with pytest.raises(fxshard.BudgetError):
        later(mock.Mock(side_effect=fxshard.BudgetError(1, 2)), "it")([])
