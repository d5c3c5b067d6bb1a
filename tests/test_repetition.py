"""Tracing repeated layers once gives the plan that tracing all of them gives, event by event."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard._torch import private
from fxshard.bench.presets import Moe, MoeConfig, example
from fxshard.frontend.lowering.segments import interpreted
from fxshard.passes import partition
from fxshard.passes.fold_layers import Folded
from fxshard.schedule.events import Event
from tests.thorough import thorough
from tests.toy import Linears, Llama, batch

Example = tuple[nn.Module, tuple[Tensor, ...]]
TOKENS = batch(0, 1, 0, 96, size=2)


def llama(layers: int) -> Example:
    with torch.device("meta"):
        return Llama(layers=layers), TOKENS


def experts(layers: int) -> Example:
    """The first layer is another one than the rest."""
    shape = MoeConfig(64, 32, layers, 1, 2, 16, 8, 4, dense_hidden=64, experts=4, active=2, hidden=16)
    model, _ = example(Moe, shape)
    return model, (torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))


class Odd(Linears):
    """Same layers, but something happens after one of them, or one is used again at the end."""

    def __init__(self, layers: int, odd: int, *, again: bool = False) -> None:
        super().__init__(layers, 16)
        self.odd, self.again = odd, again

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i == self.odd:
                kept, x = x, x * 2
        return self.layers[self.odd](x).sum() if self.again else (x + kept).sum()


class Uneven(Linears):
    """One layer has no bias."""

    def __init__(self) -> None:
        super().__init__(8, 16)
        self.layers[3].bias = None  # type: ignore[assignment]


def planned(example: Example, lowering: str, *, fold: bool) -> fxshard.Schedule:
    return fxshard.plan(*example, world_size=8, lowering=lowering, debug=fxshard.Debug(fold_layers=fold))


def without_names(schedule: fxshard.Schedule) -> list[Event]:
    """Events without the names of nodes: those of layers that were not traced are counted otherwise."""
    return [replace(event, why=re.sub(r"_\d+\b", "", event.why)) for event in schedule.events]


def same(example: Example, lowering: str = "eager") -> int:
    """Whether both plans are equal; returns how many layers were folded."""
    folded, calls = [], partition.unfold_step

    def unfold(found: Sequence[Folded], *args: Any) -> Any:
        parts = calls(found, *args)
        folded.append(sum(stack.removed for stack in found) if parts is not None else 0)
        return parts

    with mock.patch.object(partition, "unfold_step", unfold):
        short = planned(example, lowering, fold=True)
    assert without_names(short) == without_names(planned(example, lowering, fold=False))
    return sum(folded)


@pytest.mark.parametrize(
    ("make", "layers", "lowering", "removed"),
    [
        thorough(llama, 8, "eager", 3),
        thorough(experts, 8, "eager", 2),
        thorough(llama, 7, "inductor", 2),
        thorough(experts, 8, "inductor", 2),
    ],
)
def test_the_plan_is_that_of_the_whole_trace(
    make: Callable[[int], Example], layers: int, lowering: str, removed: int
) -> None:
    assert same(make(layers), lowering) == removed


@pytest.mark.shows("P2")
@pytest.mark.parametrize("make", [lambda: Odd(8, 3), thorough(lambda: Odd(8, 3, again=True)), Uneven])
def test_what_does_not_repeat_is_traced_whole(make: Callable[[], nn.Module]) -> None:
    assert same((make(), (torch.ones(4, 16),))) == 0


@pytest.mark.shows("A4")
def test_compilations_do_not_grow_with_depth() -> None:
    """``test_huggingface`` has it for a model of ``transformers``. Five layers are all traced."""
    found = []
    for layers in (5, 9):
        model = fxshard.compile(Odd(layers, layers - 1), lowering="eager")
        model(torch.ones(4, 16)).backward()
        found.append(model.report.compilations)
    fewer, more = found
    assert fewer.layers_folded == 0 < more.layers_folded
    assert more.segments > fewer.segments and more.compiled == fewer.compiled


class Dropping(Linears):
    """Layers with dropout, checkpointed where asked for."""

    def __init__(self, layers: int, checkpointed: bool) -> None:
        super().__init__(layers, 16)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        def block(layer: nn.Module, x: Tensor) -> Tensor:
            return functional.dropout(layer(x).tanh(), 0.5)

        for layer in self.layers:
            x = checkpoint(block, layer, x, use_reentrant=False) if self.checkpointed else block(layer, x)
        return x.sum()


@pytest.mark.shows("A4")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compilations_do_not_grow_with_depth_where_inductor_draws_random_numbers(checkpointed: bool) -> None:
    """It numbers the seeds of a graph: layers would differ by that. What is compiled is asked, and not the compiler."""
    found = []
    with mock.patch.object(private, "inductor_compile", lambda segment, inputs: interpreted(segment)):
        for layers in (5, 9):
            model = fxshard.compile(Dropping(layers, checkpointed))
            model(torch.ones(4, 16)).backward()
            found.append(model.report.compilations)
    fewer, more = found
    assert more.layers_folded > 0 and more.segments > fewer.segments
    assert more.compiled == fewer.compiled


class Thinning(nn.Module):
    """Each layer keeps half of what the one before it kept, if their random numbers are independent."""

    def __init__(self, layers: int, checkpointed: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((1,), 0.5)) for _ in range(layers))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        def block(weight: Tensor, x: Tensor) -> Tensor:
            return functional.dropout(x * weight, 0.5, self.training)

        for weight in self.weights:
            x = checkpoint(block, weight, x, use_reentrant=False) if self.checkpointed else block(weight, x)
        return x.sum()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("layers", [thorough(3), 8])
def test_layers_draw_random_numbers_of_their_own(layers: int, checkpointed: bool) -> None:
    """What goes through all layers is counted; a weight's gradient is twice that in backward, of the same numbers."""
    model = fxshard.compile(Thinning(layers, checkpointed))
    count = 1 << 16
    kept = model(torch.ones(count))
    kept.backward()
    expected = count / 2**layers
    assert abs(kept.item() - expected) < 6 * expected**0.5
    for weight in model.parameters():
        assert weight.grad is not None and weight.grad.item() == 2 * kept.item()
    if not checkpointed:  # an evaluation is the same with and without
        with torch.no_grad():
            assert model.eval()(torch.ones(count)).item() == expected


@pytest.mark.shows("P2")
def test_the_first_and_the_last_layer_may_differ() -> None:
    assert same((Odd(8, 7), (torch.ones(4, 16),))) > 0
