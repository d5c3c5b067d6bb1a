"""Changes of parameters between steps: seen by what was gathered before them, or refused, but never overlooked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.schedule.events import Kind, Phase
from tests.pool import Pool
from tests.stack import Stack, batch
from tests.thorough import thorough

Change = Callable[[nn.Module], None]


def on_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


def on_the_state_dict(model: nn.Module) -> None:
    for value in model.state_dict().values():
        value.add_(0.25)


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    said(model)


def by_foreach(model: nn.Module) -> None:
    torch._foreach_mul_(list(model.parameters()), 1.25)
    said(model)


def through_rows(model: nn.Module) -> None:
    for parameter in model.parameters():
        rows: Any = parameter
        (rows.to_local() if isinstance(model, fxshard.ShardedModule) else rows).mul_(0.75)


def on_detached(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().mul_(0.8)


def said(model: nn.Module) -> None:
    if isinstance(model, fxshard.ShardedModule):
        model.parameters_changed()


CHANGES: tuple[Change, ...] = (on_parameters, on_the_state_dict, through_data, by_foreach, through_rows, on_detached)


def unsaid(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.data.mul_(2.0)


def changed(zero: int) -> dict[str, Any]:
    """Steps with a change after each, next to plain PyTorch; then a change that no counter sees."""
    model = fxshard.compile(Stack(), zero=zero, optimizer=fxshard.AdamW(lr=1e-2), lowering="eager")
    plain, rank = Stack(), dist.get_rank()
    found: dict[str, Any] = {}
    model(*batch(0, rank)).backward()
    model.optimizer.step()
    for number, change in enumerate(CHANGES):
        plain.load_state_dict(model.full_state_dict())
        with torch.no_grad():
            change(model)
            change(plain)
        loss, expected = model(*batch(number, rank)), plain(*batch(number, rank))
        found[change.__name__] = (float(loss.detach()), float(expected.detach()))
        loss.backward()
        model.optimizer.step()
    found["carried"] = bool(list(model.schedule.of(Kind.UNSHARD, phase=Phase.OPTIMIZER)))
    if zero == 1:
        model(*batch(0, rank)).backward()  # gathers; what is there now is used again by the next forward
    unsaid(model.parameters())
    found["refused"] = []
    for _ in range(2):
        try:
            model(*batch(0, rank))
        except fxshard.StateError as error:
            found["refused"].append(str(error))
    model.parameters_changed()
    plain.load_state_dict(model.full_state_dict())
    found["said at last"] = (float(model(*batch(0, rank)).detach()), float(plain(*batch(0, rank)).detach()))
    return found


@pytest.mark.parametrize("zero", [thorough(1), 3])
def test_changes_between_steps_are_seen(ranks: Pool, zero: int) -> None:
    for found in ranks(2, changed, zero):
        assert found.pop("carried") is (zero == 3)  # or nothing would be shown about gathers ahead of a forward
        refused = found.pop("refused")
        assert len(refused) == 2 and all("parameters_changed()" in text and "layers.1" in text for text in refused)
        for name, (mine, plain) in found.items():
            assert mine == pytest.approx(plain, rel=1e-5), name


def test_a_copy_of_another_precision_is_seen_too() -> None:
    """Alone, what a graph computes with is a copy of the master where their dtypes differ. Below ZeRO-3 it stays."""
    model = fxshard.compile(Stack(), zero=2, lowering="eager", precision=fxshard.Precision(param=torch.bfloat16))
    x, y = batch(0, 0)
    before = float(model(x, y).detach())
    with torch.no_grad():
        model.state_dict()["head.bias"].add_(10.0)
    changed = float(model(x, y).detach())
    assert changed > before + 10
    unsaid(model.parameters())
    with pytest.raises(fxshard.StateError, match=r"parameters_changed\(\)"):
        model(x, y)


@pytest.mark.parametrize(
    ("scaling", "zero"),
    [("tensor", 3), ("row", 2), ("block", 3), thorough("tensor", 2), thorough("row", 3), thorough("block", 2)],
)
def test_copies_in_float8_are_compared_with_the_masters(scaling: Any, zero: int) -> None:
    """Evaluation uses what the last forward quantized, as long as masters are what they were then."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(128, 256, bias=False), nn.ReLU(), nn.Linear(256, 128, bias=False))
    precision = fxshard.Float8(scaling=scaling, smallest=1)
    model = fxshard.compile(plain, zero=zero, lowering="eager", precision=precision)
    x = torch.randn(16, 128)
    weight = model.get_parameter("0.weight")
    with torch.no_grad():
        weight[0, 0] = 1.75  # the largest there is: quantized, it is the largest of float8
    before = model(x).detach()
    assert torch.equal(model(x), before)
    weight.data[0, 0] = 1.75 * (1 + 2**-9)  # rounding to bf16 hides it
    assert torch.equal(model(x), before)
    weight.data[0, 0] = 4.0  # with the old scale it would be quantized to the same
    with pytest.raises(fxshard.StateError, match=r"parameters_changed\(\)"):
        model(x)
    model.parameters_changed()
    assert not torch.equal(model(x), before)
    weight.data[1, 1] *= 1.5
    with pytest.raises(fxshard.StateError, match=r"parameters_changed\(\)"):
        model(x)
