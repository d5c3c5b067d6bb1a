"""Buckets: kinds of parameters, their order, their dtypes, and the bytes a rank holds between steps."""

from dataclasses import astuple

import pytest
import torch
from torch import nn

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.buckets import plan_buckets
from fxshard.planner.choice import LayoutKind
from fxshard.planner.domain import ZERO, Placement
from fxshard.planner.precision import Precision
from fxshard.planner.units import find_units
from tests.toy import Llama

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def plan(
    model: nn.Module, zero: int = 3, ranks: int = 4, precision: Precision | None = None, layout: LayoutKind = "rows"
) -> tuple[BucketPlan, ...]:
    return plan_buckets(model, find_units(model), zero=zero, ranks=ranks, precision=precision, layout=layout)


class Mixture(nn.Module):
    """One unit with every kind of parameter there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 64))
        self.short = nn.Parameter(torch.zeros(4, 64, dtype=BF16))
        self.frozen = nn.Parameter(torch.zeros(2, 64), requires_grad=False)
        self.gain = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.zeros(64))


@pytest.mark.shows("L6")
@pytest.mark.parametrize("layers", [2, 5])
def test_buckets_come_in_the_order_in_which_backward_finishes(layers: int) -> None:
    """The last unit of forward is the first of backward; positions are indices into the plan."""
    plans = plan(Llama(layers=layers))
    blocks = [f"layers.{i}" for i in reversed(range(layers))]
    assert [bucket.unit for bucket in plans] == ["norm+head", *blocks, "emb"]
    assert [bucket.index for bucket in plans] == list(range(len(plans)))
    assert len({bucket.name for bucket in plans}) == len(plans)


@pytest.mark.shows("L8")
@pytest.mark.parametrize("layout", ["rows", "whole"])
def test_every_parameter_is_in_exactly_one_bucket(layout: LayoutKind) -> None:
    model = nn.ModuleList([Mixture(), Mixture(), Llama(tied=True)])
    placed = [name for bucket in plan(model, layout=layout) for name in bucket.params]
    assert sorted(placed) == sorted(name for name, _ in model.named_parameters())


def test_kinds_do_not_share_a_bucket() -> None:
    plans = plan(Mixture())
    assert {bucket.name.partition(" ")[2]: bucket.params for bucket in plans} == {
        "[float32, trained, tensor]": ("weight", "bias"),
        "[bfloat16, trained, tensor]": ("short",),
        "[float32, frozen, tensor]": ("frozen",),
        "[float32, trained, scalar]": ("gain",),
    }
    assert [bucket.trainable for bucket in plans] == [True, True, False, True]


def test_a_suffix_names_only_what_differs() -> None:
    model = Mixture()
    del model.short, model.gain
    assert [bucket.name for bucket in plan(model)] == [f"weight+frozen+bias [{kind}]" for kind in ("trained", "frozen")]
    del model.frozen
    assert [bucket.name for bucket in plan(model)] == ["weight+bias"]


@pytest.mark.parametrize("zero", ZERO)
def test_placements_of_the_kinds(zero: int) -> None:
    weight, _, frozen, scalar = plan(Mixture(), zero=zero)
    assert weight.placement == ZERO[zero]
    assert weight.layout.ranks == (1 if zero == 0 else 4)
    # Nothing but the parameter exists of a frozen one, so it is sharded when parameters are.
    assert frozen.placement == Placement(param=zero == 3, grad=False, state=zero == 3)
    assert frozen.layout.ranks == (4 if zero == 3 else 1)
    assert scalar.placement == ZERO[0] and scalar.layout.ranks == 1


@pytest.mark.parametrize(
    "zero, ranks, resident, in_arena",
    [(0, 4, True, False), (1, 4, True, False), (2, 4, True, True), (3, 4, False, True), (3, 1, True, False)],
)
def test_what_lives_in_the_arena(zero: int, ranks: int, resident: bool, in_arena: bool) -> None:
    weight, _, frozen, scalar = plan(Mixture(), zero=zero, ranks=ranks)
    assert (weight.resident, weight.grad_in_arena) == (resident, in_arena)
    assert (frozen.resident, frozen.grad_in_arena, frozen.grad_bytes) == (resident, False, 0)
    assert (scalar.resident, scalar.grad_in_arena) == (True, False)


@pytest.mark.parametrize(
    "precision, dtypes",
    [
        (None, (F32, F32, F32)),
        (Precision(), (F32, F32, F32)),
        (Precision(param=BF16), (BF16, F32, BF16)),
        (Precision(param=BF16, reduce=F32), (BF16, F32, F32)),
        (Precision(param=BF16, master=None), (BF16, F32, BF16)),
        (Precision(param=BF16, master=BF16), (BF16, BF16, BF16)),
        (Precision(reduce=BF16), (F32, F32, BF16)),
    ],
    ids=str,
)
def test_dtypes_of_a_float32_model(precision: Precision | None, dtypes: tuple[torch.dtype, ...]) -> None:
    (bucket,) = plan(nn.Linear(64, 64), precision=precision)
    assert (bucket.param_dtype, bucket.master_dtype, bucket.reduce_dtype) == dtypes
    assert bucket.gathered_bytes == bucket.layout.numel * dtypes[0].itemsize
    assert bucket.grad_bytes == bucket.layout.numel * dtypes[2].itemsize


def test_dtypes_of_a_bfloat16_model() -> None:
    (kept,) = plan(nn.Linear(64, 64, dtype=BF16))
    assert (kept.param_dtype, kept.master_dtype, kept.reduce_dtype) == (BF16, BF16, BF16)
    (mixed,) = plan(nn.Linear(64, 64, dtype=BF16), precision=Precision())
    assert (mixed.param_dtype, mixed.master_dtype, mixed.reduce_dtype) == (BF16, F32, BF16)


def test_a_frozen_parameter_has_no_master_of_its_own() -> None:
    frozen = plan(Mixture(), precision=Precision(param=BF16))[2]
    assert not frozen.trainable
    assert (frozen.param_dtype, frozen.master_dtype) == (BF16, BF16)


# A 64 × 128 weight over 4 ranks: 8192 elements, 2048 a rank, no padding.
@pytest.mark.parametrize(
    "zero, precision, expected",
    [
        # In one dtype: the parameter is the master. Gradients stay in the master's dtype; two state tensors.
        (0, None, (32768, 32768, 65536)),
        (1, None, (32768, 8192 + 32768, 16384)),
        (2, None, (32768, 8192, 16384)),
        (3, None, (8192, 8192, 16384)),
        # bf16 to compute and reduce, fp32 masters in the state: three fp32 tensors there.
        (0, Precision(param=BF16), (16384, 32768, 98304)),
        (1, Precision(param=BF16), (16384, 8192 + 16384, 24576)),
        (2, Precision(param=BF16), (16384, 8192, 24576)),
        (3, Precision(param=BF16), (0, 8192, 24576)),
        # Full gradients that stay are kept in the dtype they are reduced in.
        (1, Precision(param=BF16, reduce=F32), (16384, 8192 + 32768, 24576)),
        # Masters of the same size but another dtype are still masters.
        (2, Precision(param=F16, master=BF16), (16384, 4096, 12288)),
    ],
    ids=str,
)
def test_bytes_at_rest(zero: int, precision: Precision | None, expected: tuple[int, int, int]) -> None:
    (bucket,) = plan(nn.Linear(128, 64, bias=False), zero=zero, precision=precision)
    assert astuple(bucket.at_rest()) == expected


@pytest.mark.parametrize("zero", ZERO)
def test_one_rank_holds_everything_once(zero: int) -> None:
    (bucket,) = plan(nn.Linear(128, 64, bias=False), zero=zero, ranks=1)
    assert astuple(bucket.at_rest()) == (32768, 32768, 65536)
    (bucket,) = plan(nn.Linear(128, 64, bias=False), zero=zero, ranks=1, precision=Precision(param=BF16))
    cast = 0 if zero == 3 else 16384  # parameters in bf16 go through the arena, or stay
    assert astuple(bucket.at_rest(state_tensors=1)) == (cast, 32768, 65536)


@pytest.mark.parametrize("zero, param", [(0, 32768), (1, 32768), (2, 32768), (3, 8192)])
def test_a_frozen_parameter_has_neither_gradient_nor_state(zero: int, param: int) -> None:
    (bucket,) = plan(nn.Linear(128, 64, bias=False).requires_grad_(False), zero=zero)
    assert astuple(bucket.at_rest()) == (param, 0, 0)


def test_padding_is_part_of_what_is_held() -> None:
    """Three rows of one element over two ranks: two shards of 64."""
    (bucket,) = plan(nn.Linear(1, 3, bias=False), zero=3, ranks=2)
    assert bucket.layout.numel == 128
    assert astuple(bucket.at_rest()) == (256, 256, 512)
