"""Buckets: one unit's parameters of one kind, in one flat buffer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.kernels.float8 import COLUMNWISE, ROWWISE, scale_shape
from fxshard.kernels.mxfp8 import BLOCK
from fxshard.plan.choice import LayoutKind, choose_layout, crosses, span_units
from fxshard.plan.dealing import Dealt, Member, deal
from fxshard.plan.domain import UNKNOWN, ZERO, BytesPerRank, Domain, DomainOf, Placement
from fxshard.plan.gather_modes import Copies, Float8Recipe, Gather
from fxshard.plan.layout import Layout, TensorSpec, aligned
from fxshard.plan.matrices import matrix_cost
from fxshard.plan.parts import Cuts
from fxshard.plan.precision import Precision
from fxshard.plan.quantized import Quantized, choose_linears
from fxshard.plan.state import StateChoice, bytes_of_moments, staging_bytes
from fxshard.plan.tuning import LARGEST_SHARE
from fxshard.plan.units import Unit
from fxshard.plan.whole import check_padding

SCALES = 4
"""The scales of a weight begin at a multiple of so many, 16 bytes: Inductor compiles for inputs that do, and copies
others before every call."""


@dataclass(frozen=True)
class BucketPlan:
    """Everything about a bucket that can be known without a process group: what ranks must agree on."""

    index: int
    name: str
    unit: str
    layout: Layout
    placement: Placement
    param_dtype: torch.dtype
    master_dtype: torch.dtype
    reduce_dtype: torch.dtype
    trainable: bool
    gather: Gather = Gather.PLAIN
    """What travels when the bucket is gathered; anything but ``PLAIN`` holds weights of quantized linears."""
    domain: Domain = UNKNOWN
    matrices: tuple[str, ...] = ()
    """The parameters that Muon updates; the others are AdamW's."""
    why: str = ""
    """Why it has the layout it has."""
    shares_state: bool = False
    """Whether replicas of a shard keep state of a part of it each (HSDP); not where Muon's matrices travel."""
    float8: Float8Recipe | None = None
    """How products with these parameters run in float8; what is quantized otherwise is so in MXFP8."""
    state: str = "fp32"
    """The format of the optimizer's moments: "fp32" (as the masters are), "bf16" or "8bit"."""
    offload: str = "none"
    """Where they are between steps: "none", on the device, or on the "host"."""
    row_moments: bool = False
    """Whether Muon keeps a second moment of every row of the matrices (NorMuon)."""
    cuts: Cuts | None = None
    """Which of the matrices are cut over a tensor-parallel group; ``layout`` is that of this rank's parts."""

    @property
    def params(self) -> tuple[str, ...]:
        return self.layout.names

    @property
    def resident(self) -> bool:
        """Whether the unsharded parameters stay in memory all the time instead of in the arena.

        With one rank the masters are whole: parameters that compute in their dtype are the masters themselves, and
        quantized copies stay. What is cast goes through the arena under ZeRO-3, as where it is gathered.
        """
        cast = self.param_dtype != self.master_dtype and not self.rests_quantized
        return not self.placement.param or (self.layout.ranks == 1 and not cast)

    @property
    def grad_in_arena(self) -> bool:
        """Whether full gradients only exist during backward; otherwise they are written to where they stay."""
        return self.trainable and self.placement.grad and self.layout.ranks > 1

    @property
    def adds_replicas(self) -> bool:
        """Whether a reduced shard is added up over its replicas by a collective of its own (HSDP).

        What is not sharded needs none: its one all-reduce is over all ranks.
        """
        return self.trainable and self.layout.ranks > 1 and self.domain.replicas > 1

    @property
    def reducing_ranks(self) -> int:
        """Ranks that a reduction of full gradients runs over: the shards, or all ranks where there is one shard."""
        return self.layout.ranks if self.layout.ranks > 1 else self.domain.ranks

    def group(self, default: str, *, replicas: bool = False) -> str:
        """What a schedule calls the process group of this bucket's collectives, or of those over its replicas."""
        if not self.domain.device:
            return default
        return (
            self.domain.group(self.domain.replicas, "replicas") if replicas else self.domain.group(self.reducing_ranks)
        )

    @property
    def quantized(self) -> bool:
        """Whether products with these parameters run in MXFP8 or float8."""
        return self.gather is not Gather.PLAIN

    @property
    def rests_quantized(self) -> bool:
        """Whether unsharded parameters exist as quantized copies only."""
        return self.gather in (Gather.STAGED, Gather.DIRECT)

    @property
    def staged(self) -> bool:
        """Whether a gather goes through a staging buffer, which shares memory with gradients."""
        return self.gather is Gather.STAGED and self.layout.ranks > 1

    @property
    def staged_in_arena(self) -> bool:
        """Whether that memory is the arena's (ZeRO-2) and not a full gradient that stays (ZeRO-1)."""
        return self.staged and self.grad_in_arena

    @property
    def gathered_bytes(self) -> int:
        """Bytes that one gather makes; of a bucket that is gathered quantized, of one copy."""
        if self.gather is Gather.DIRECT:
            return self.copy_bytes(self.layout.numel)
        return self.layout.numel * self.param_dtype.itemsize

    def copy_bytes(self, numel: int) -> int:
        """Bytes of one quantized copy: payload and compact scales, which in float8 all ranks have without a gather."""
        return numel + numel // BLOCK if self.float8 is None else numel

    @property
    def all_copies(self) -> Copies:
        """The quantized copies that there are."""
        return Copies.BOTH if self.float8 is None or self.float8.copies == 2 else Copies.ROWWISE

    @property
    def scale_shapes(self) -> tuple[tuple[int, int], ...]:
        """Of the scales of every copy of every parameter, in float8: those of the rowwise copy first."""
        if self.float8 is None or not self.rests_quantized:
            return ()
        axes = (ROWWISE, COLUMNWISE)[: self.float8.copies]
        shapes = [slot.spec.shape for slot in self.layout.slots]
        return tuple(scale_shape(shape, self.float8.scaling, axis) for shape in shapes for axis in axes)

    @property
    def scale_spans(self) -> tuple[tuple[int, int], ...]:
        """Where each lies among the scales of the bucket: its first, and the one after its last."""
        spans, start = [], 0
        for rows, columns in self.scale_shapes:
            spans.append((start, start + rows * columns))
            start += aligned(rows * columns, SCALES)
        return tuple(spans)

    @property
    def scale_count(self) -> int:
        """How many scales a bucket has room for."""
        return aligned(self.scale_spans[-1][1], SCALES) if self.scale_shapes else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of those scales, which every rank holds."""
        return self.scale_count * torch.float32.itemsize

    @property
    def grad_bytes(self) -> int:
        return self.layout.numel * self.reduce_dtype.itemsize if self.trainable else 0

    @cached_property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's moments on the rank that has most of them, wherever they are kept."""
        return bytes_of_moments(self) if self.trainable else 0

    @cached_property
    def staging_bytes(self) -> int:
        """What an update holds on the device of moments that rest on the host."""
        return staging_bytes(self)

    def at_rest(self, state_tensors: int = 2) -> BytesPerRank:
        """Bytes one rank holds for this bucket between two steps, gradients not yet dropped: the table of its stage.

        ``state`` counts the optimizer's tensors (AdamW has two, Muon one: the second covers AdamW's parameters only),
        unless they are on the host, and, where parameters compute in another dtype, the masters. A master that has the
        compute dtype is the parameter itself, so it costs nothing where that is replicated.
        """
        layout, size = self.layout, self.master_dtype.itemsize
        masters = layout.shard_numel * size
        mixed = self.param_dtype != self.master_dtype
        if self.rests_quantized:
            held = layout.numel if self.resident else layout.shard_numel
            param, state = self.all_copies.number * self.copy_bytes(held) + self.scale_bytes, masters
        elif self.resident:
            param, state = layout.numel * self.param_dtype.itemsize, masters if mixed else 0
        else:
            param, state = (0, masters) if mixed else (masters, 0)
        if not self.trainable:
            return BytesPerRank(param, 0, state)
        keeps_full_grad = not self.placement.grad and layout.ranks > 1
        if self.offload == "none":
            state += self.moment_bytes if state_tensors == 2 else masters * state_tensors
        return BytesPerRank(param, masters + (self.grad_bytes if keeps_full_grad else 0), state)


@dataclass(frozen=True)
class Kind:
    """What parameters of one bucket have in common."""

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
    """What all buckets of a model have in common."""

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
) -> dict[Kind, list[TensorSpec]]:
    """The parameters of a unit by what keeps them apart."""
    kinds: dict[Kind, list[TensorSpec]] = {}
    for name in unit.params:
        parameter = parameters[name]
        scalar = parameter.ndim == 0
        stack = name in quantized and parameter.ndim == 3 and rules.float8 is not None
        kind = Kind(parameter.dtype, parameter.requires_grad, scalar, name in quantized, domain_of(name), stack)
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
    kind: Kind,
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


def _gather(rules: _Rules, kind: Kind, ranks: int) -> Gather:
    """What one rank owns alone does not travel: in MXFP8 both copies rest there, as in a staged bucket."""
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


def _kind_suffix(own: Kind, among: Iterable[Kind], quantized: str) -> str:
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
