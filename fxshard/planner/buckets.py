"""Buckets: one unit's parameters of one kind, in one flat buffer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.choice import LayoutKind, choose_layout, crosses, span_units
from fxshard.planner.dealing import Dealt, Member, deal
from fxshard.planner.domain import ZERO, Domain, DomainOf, Placement
from fxshard.planner.gather_modes import Float8Recipe, Gather
from fxshard.planner.layout import TensorSpec
from fxshard.planner.matrices import matrix_cost
from fxshard.planner.parts import Cuts
from fxshard.planner.precision import Precision
from fxshard.planner.quantized import Quantized, choose_linears
from fxshard.planner.state import StateChoice
from fxshard.planner.tuning import LARGEST_SHARE
from fxshard.planner.units import Unit
from fxshard.planner.whole import check_padding


@dataclass(frozen=True)
class BucketKind:
    """The properties that all parameters of one bucket share."""

    dtype: torch.dtype
    trainable: bool
    scalar: bool
    quantized: bool
    domain: Domain
    stack: bool = False
    """Whether these are experts that, other than linears, travel in bf16."""


def plan_buckets(
    model: nn.Module,
    units: Iterable[Unit],
    *,
    zero: int,
    ranks: int,
    precision: Precision | None = None,
    layout: LayoutKind = "auto",
    domain_of: DomainOf | None = None,
    matrices: Collection[str] = (),
    state: StateChoice = StateChoice(),  # noqa: B008
    cuts: Cuts | None = None,
) -> tuple[BucketPlan, ...]:
    """One bucket per unit and kind of parameter, in the order in which backward is expected to finish gradients.

    Kinds differ in dtype, in whether they are trained and quantized, and in the ranks they are data-parallel over (by
    default ``ranks`` shards). A scalar has no rows to shard and is replicated. ``matrices`` are the parameters that
    Muon updates: they decide about layouts, and under ZeRO-1 and 2 about how many units share a bucket. They share it
    with the parameters that AdamW updates, so Muon adds no collective. ``state``: how optimizer state is kept.
    ``cuts``: the matrices of the model that tensor-parallel ranks have parts of.
    """
    own = Domain(ranks, divisor=ranks)
    parameters = {name: private.local_part(parameter) for name, parameter in model.named_parameters()}
    rules = _Rules(
        ZERO[zero],
        precision.mode(zero) if isinstance(precision, Quantized) else Gather.PLAIN,
        precision,
        layout,
        frozenset(matrices),
        state,
        cuts,
    )
    quantized = choose_linears(model, precision).weights
    units = list(units)
    dealt: Dealt | None = None
    if matrices and layout != "rows" and rules.stage.state and not rules.stage.param:
        members = _members(units, parameters, quantized, rules, domain_of or (lambda name: own), matrices)
        dealt = deal(units, members)
        if dealt is not None:
            units = list(dealt.units)
        else:
            longest = max(1, len(units) // LARGEST_SHARE)
            units = span_units(units, lambda unit: _specs(unit, parameters), ranks, matrices, longest=longest)
    plans: list[BucketPlan] = []
    work: dict[Domain, list[float]] = {}
    for unit in reversed(units):
        kinds = _kinds(unit, parameters, quantized, rules, domain_of or (lambda name: own))
        for kind, specs in kinds.items():
            of_ranks = work.setdefault(kind.domain, [0.0] * kind.domain.shards)
            name = unit.name + _kind_suffix(kind, kinds, "mxfp8" if rules.float8 is None else "float8")
            whole = dealt is not None and unit.name in dealt.whole
            plans.append(_bucket(len(plans), name, unit.name, kind, specs, rules, of_ranks, dealt=whole))
    if not plans:
        raise ConfigError("the model has no parameters: there is nothing to shard")
    if layout == "whole":
        check_padding({plan.name: plan.layout for plan in plans})
    return tuple(plans)


@dataclass(frozen=True)
class _Rules:
    """The settings that all buckets of a model share."""

    stage: Placement
    mode: Gather
    precision: Precision | None
    layout: LayoutKind
    matrices: frozenset[str]
    state: StateChoice
    cuts: Cuts | None

    @property
    def cut(self) -> int:
        return self.precision.cut if isinstance(self.precision, Quantized) else 1

    @property
    def float8(self) -> Float8Recipe | None:
        return self.precision.recipe if isinstance(self.precision, Quantized) else None


def _kinds(
    unit: Unit, parameters: Mapping[str, torch.Tensor], quantized: Collection[str], rules: _Rules, domain_of: DomainOf
) -> dict[BucketKind, list[TensorSpec]]:
    """The parameters of a unit by what keeps them apart."""
    kinds: dict[BucketKind, list[TensorSpec]] = {}
    for name in unit.params:
        parameter = parameters[name]
        scalar = parameter.ndim == 0
        stack = name in quantized and parameter.ndim == 3 and rules.float8 is not None
        kind = BucketKind(parameter.dtype, parameter.requires_grad, scalar, name in quantized, domain_of(name), stack)
        # A boundary between blocks lets every owner quantize alone. A stack of experts' weights is cut between its
        # matrices.
        cut = rules.cut if kind.quantized and parameter.ndim == 2 else 1
        kinds.setdefault(kind, []).append(TensorSpec(name, tuple(parameter.shape), cut))
    return kinds


def _members(
    units: Iterable[Unit],
    parameters: Mapping[str, torch.Tensor],
    quantized: Collection[str],
    rules: _Rules,
    domain_of: DomainOf,
    matrices: Collection[str],
) -> dict[str, Member]:
    """Parameters as dealing sees them."""
    found = {}
    for unit in units:
        for kind, specs in _kinds(unit, parameters, quantized, rules, domain_of).items():
            for spec in specs:
                ranks = 1 if kind.scalar else kind.domain.shards
                matrix = kind.trainable and spec.name in matrices and len(spec.shape) == 2 and ranks > 1
                found[spec.name] = Member(spec, kind, ranks, matrix)
    return found


def _bucket(
    index: int,
    name: str,
    unit: str,
    kind: BucketKind,
    specs: list[TensorSpec],
    rules: _Rules,
    work: list[float],
    *,
    dealt: bool = False,
) -> BucketPlan:
    """The plan of one bucket. ``work``: what Muon has to do on each rank, to which this bucket adds."""
    stage, trainable = rules.stage, kind.trainable
    placement = ZERO[0] if kind.scalar else stage if trainable else Placement(stage.param, False, stage.param)
    param_dtype, master_dtype, reduce_dtype = _dtypes(kind.dtype, rules.precision)
    if trainable:
        rules.state.check_masters(specs[0].name, master_dtype)
    gathers = 2 if placement.param else 1
    owned = tuple(spec.name for spec in specs if trainable and spec.name in rules.matrices)
    chosen = choose_layout(
        specs,
        kind.domain.shards if placement.state else 1,
        rules.layout,
        matrices=owned,
        work=work,
        bytes_moved=gathers * param_dtype.itemsize + reduce_dtype.itemsize,
        dealt=dealt,
    )
    for spec in specs:
        if chosen.layout.whole and spec.name in owned:
            work[chosen.layout.owner(spec.name)] += matrix_cost(spec.shape)
    return BucketPlan(
        index=index,
        name=name,
        unit=unit,
        layout=chosen.layout,
        placement=placement,
        param_dtype=param_dtype,
        master_dtype=master_dtype if trainable else param_dtype,
        reduce_dtype=reduce_dtype,
        trainable=trainable,
        gather=_gather(rules, kind, chosen.layout.ranks),
        domain=kind.domain,
        matrices=owned,
        why=chosen.why,
        shares_state=rules.state.over_replicas
        and trainable
        and chosen.layout.ranks > 1
        and kind.domain.replicas > 1
        and not any(crosses(chosen.layout, spec) for spec in specs if spec.name in owned),
        float8=rules.float8 if kind.quantized else None,
        state=rules.state.format if trainable else "fp32",
        offload=rules.state.offload if trainable else "none",
        row_moments=rules.state.row_moments and bool(owned),
        cuts=rules.cuts.of(owned) if rules.cuts is not None else None,
    )


def _specs(unit: Unit, parameters: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """The parameters of a unit that are trained: those that Muon may own."""
    return [TensorSpec(name, tuple(parameters[name].shape)) for name in unit.params if parameters[name].requires_grad]


def _gather(rules: _Rules, kind: BucketKind, ranks: int) -> Gather:
    """How a bucket is gathered. One that a single rank owns is not: in MXFP8 both copies rest there, as if staged."""
    if kind.stack:
        return Gather.OFF
    if not kind.quantized:
        return Gather.PLAIN
    alone = rules.mode is Gather.DIRECT and ranks == 1 and rules.float8 is None
    return Gather.STAGED if alone else rules.mode


def _dtypes(dtype: torch.dtype, precision: Precision | None) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """(compute, master, reduce) dtypes of a parameter that the model holds in ``dtype``."""
    if precision is None or not dtype.is_floating_point:
        return dtype, dtype, dtype
    param = precision.param or dtype
    return param, precision.master or dtype, precision.reduce or param


def _kind_suffix(own: BucketKind, among: Iterable[BucketKind], quantized: str) -> str:
    """A suffix that tells the buckets of one unit apart; empty where the unit has only one."""
    kinds = list(among)
    parts = []
    if len({kind.dtype for kind in kinds}) > 1:
        parts.append(str(own.dtype).removeprefix("torch."))
    if len({kind.trainable for kind in kinds}) > 1:
        parts.append("trained" if own.trainable else "frozen")
    if len({kind.scalar for kind in kinds}) > 1:
        parts.append("scalar" if own.scalar else "tensor")
    if len({kind.quantized for kind in kinds}) > 1:
        parts.append(quantized if own.quantized else "plain")
    if len({kind.stack for kind in kinds}) > 1 and own.stack:
        parts.append("experts")
    if own.domain.name:
        parts.append(own.domain.name)
    return f" [{', '.join(parts)}]" if parts else ""
