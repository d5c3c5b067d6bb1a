"""Buckets under ZeRO-1 and 2 with Muon: matrices of neighbouring layers that fill the ranks, so that none travels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxshard
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.buckets import plan_buckets
from fxshard.planner.exchange import plan_exchange
from fxshard.planner.layout import TensorSpec
from fxshard.planner.units import find_units
from fxshard.planner.whole import whole_layout
from fxshard.schedule.events import Kind
from tests.pool import Pool
from tests.test_muon import MUON, against_plain
from tests.thorough import thorough
from tests.toy import Llama
from tests.training import all_data_for, full_gradients, llama, my_data_for, step_beside


class Layers(nn.Module):
    """Blocks of matrices of given shapes, each with a norm, and a table in front."""

    def __init__(self, blocks: list[list[tuple[int, int]]]) -> None:
        super().__init__()
        with torch.device("meta"):
            self.emb = nn.Embedding(100, 32)
            self.layers = nn.ModuleList(
                nn.ParameterDict(
                    {
                        **{f"w{i}": nn.Parameter(torch.empty(shape)) for i, shape in enumerate(shapes)},
                        "norm": nn.Parameter(torch.empty(32)),
                    }
                )
                for shapes in blocks
            )


def hidden(model: nn.Module) -> list[TensorSpec]:
    named = model.named_parameters()
    return [TensorSpec(name, tuple(p.shape)) for name, p in named if p.ndim == 2 and name.startswith("layers")]


def planned(model: nn.Module, zero: int, ranks: int, **options: object) -> tuple[BucketPlan, ...]:
    names = [spec.name for spec in hidden(model)]
    return plan_buckets(model, find_units(model), zero=zero, ranks=ranks, matrices=names, **options)  # type: ignore[arg-type]


def travelling(plans: tuple[BucketPlan, ...]) -> int:
    return sum(len(batch.travels) for batch in plan_exchange(plans))


def joint_padding(model: nn.Module, ranks: int) -> float:
    """Of one whole layout of all matrices: the assignment that must be good enough for none to travel."""
    layout = whole_layout(hidden(model), ranks)
    return layout.padding / (layout.numel - layout.padding)


@pytest.mark.shows("X1", "L3")
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_no_matrix_of_a_llama_travels(ranks: int, zero: int) -> None:
    with torch.device("meta"):
        model = Llama(vocab=32000, dim=1024, layers=16, heads=16, hidden=2816)
    assert joint_padding(model, ranks) <= 0.02
    plans = planned(model, zero, ranks)
    assert travelling(plans) == 0
    with_matrices = [plan for plan in plans if plan.matrices]
    held = sum(slot.spec.numel for plan in with_matrices for slot in plan.layout.slots)
    assert sum(plan.layout.padding for plan in with_matrices) <= 0.02 * held
    layer = held / 16
    largest = max(sum(slot.spec.numel for slot in plan.layout.slots) for plan in with_matrices)
    assert largest <= max(2.0, 0.7 * ranks) * layer, "reductions stay about as small as units allow"
    last = with_matrices[-1]  # its gradients are complete when backward ends: nothing hides its reduction
    assert sum(slot.spec.numel for slot in last.layout.slots) <= max(2.0, 0.7 * ranks) * layer


shapes = st.sampled_from([(512, 512), (512, 1024), (1024, 512), (1536, 512), (512, 256)])


@pytest.mark.shows("X1", "L8")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(shapes, min_size=1, max_size=4), min_size=2, max_size=12), st.integers(2, 6))
def test_none_travels_where_an_assignment_exists(blocks: list[list[tuple[int, int]]], ranks: int) -> None:
    model = Layers(blocks)
    plans = planned(model, 1, ranks)
    placed = sorted(name for plan in plans for name in plan.params)
    assert placed == sorted(name for name, _ in model.named_parameters())
    assert len({plan.name for plan in plans}) == len(plans)
    if joint_padding(model, ranks) <= 0.018:  # a little is left for the norms
        assert travelling(plans) == 0


def test_buckets_follow_backward() -> None:
    """A bucket whose earliest layer comes earlier in the model is complete later in backward."""
    with torch.device("meta"):
        model = Llama(vocab=1000, dim=256, layers=16, heads=4, hidden=896)
    names = [name for name, _ in model.named_parameters()]
    earliest = [min(names.index(name) for name in plan.params) for plan in planned(model, 2, 8)]
    layers = [int(names[i].split(".")[1]) if names[i].startswith("layers") else -1 for i in earliest]
    inside = [layer for layer in layers if layer >= 0]
    assert inside == sorted(inside, reverse=True)


def test_what_pads_too_much_stays_as_it_was() -> None:
    with torch.device("meta"):
        model = Llama(vocab=1000, dim=256, layers=4, heads=4, hidden=896)
    assert joint_padding(model, 64) > 0.02
    plans = planned(model, 1, 64)
    assert travelling(plans) > 0 and not any(plan.layout.whole for plan in plans)


def test_stacks_of_experts_are_cut_between_experts() -> None:
    """And what is large beside the matrices has a bucket of its own."""
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "layers": nn.ModuleList(
                    nn.ParameterDict(
                        {
                            "a": nn.Parameter(torch.empty(32, 32)),
                            "b": nn.Parameter(torch.empty(32, 32)),
                            "experts": nn.Parameter(torch.empty(8, 32, 64)),
                        }
                    )
                    for _ in range(4)
                )
            }
        )
    names = [name for name, _ in model.named_parameters()]
    plans = plan_buckets(model, find_units(model), zero=1, ranks=4, matrices=names)
    assert travelling(plans) == 0
    for plan in plans:
        for slot in plan.layout.slots:
            holders = [rank for rank in range(4) if plan.layout.fragment(rank, slot.spec.name).numel]
            assert len(holders) == (4 if "experts" in slot.spec.name else 1)


@pytest.mark.shows("X1")
@pytest.mark.parametrize("ranks", [8, 64])
def test_whole_layouts_that_are_mostly_padding_are_refused(ranks: int) -> None:
    with torch.device("meta"):
        model = Llama(vocab=32000, dim=1024, layers=4, heads=16, hidden=2816)
    with pytest.raises(fxshard.ConfigError, match=rf"layout='whole' on {ranks} ranks would add \d+% .*'auto'"):
        plan_buckets(model, find_units(model), zero=3, ranks=ranks, layout="whole")


# -- on ranks ----------------------------------------------------------------------------------------------------------


def stepped() -> dict[str, list[str]]:
    return {f"ZeRO-{zero}": against_plain(MUON, lambda: llama(layers=3), zero=zero) for zero in (1, 2)}


@pytest.mark.shows("X1", "O1", "O3")
def test_steps_equal_those_of_the_plain_optimizer(ranks: Pool) -> None:
    for found in ranks(3, stepped):
        assert found == {name: [] for name in found}


def trained(zero: int) -> tuple[list[str], int, int]:
    """Two steps of real training, gradients and parameters against a plain model on the global batch."""
    model = fxshard.compile(llama(layers=3), optimizer=MUON, zero=zero, lowering="eager")
    plain = llama(layers=3)
    reference, wrong = MUON.build(plain), []
    for step in range(2):
        model(*my_data_for(model, step)).backward()
        plain.zero_grad()
        plain(*all_data_for(plain, step, 2)).backward()
        grads = full_gradients(model)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            if not torch.allclose(grads[name], parameter.grad, rtol=1e-4, atol=1e-6):
                wrong.append(f"step {step}: {name}")
        wrong += step_beside(model, plain, reference, grads, step)
    exchanges = sum(event.kind is Kind.EXCHANGE for event in model.schedule.events)
    spanning = sum(len({n.split(".")[1] for n in b.matrices}) > 1 for b in model.schedule.buckets)
    return wrong, exchanges, spanning


@pytest.mark.shows("X1")
@pytest.mark.parametrize("zero", [thorough(1), thorough(2)])
def test_training_with_buckets_that_span_layers(ranks: Pool, zero: int) -> None:
    for wrong, exchanges, spanning in ranks(2, trained, zero):
        assert wrong == [] and exchanges == 0 and spanning > 0
