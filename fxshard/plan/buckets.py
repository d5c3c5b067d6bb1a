"""Buckets: one unit's parameters of one kind, in one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fxshard.config import Precision
from fxshard.errors import ConfigError
from fxshard.plan.layout import Layout, TensorSpec
from fxshard.plan.placement import ZERO, BytesPerRank, Placement, bytes_at_rest
from fxshard.plan.rows import row_layout
from fxshard.plan.units import Unit
from fxshard.plan.whole import whole_layout
from fxshard.precision.modes import Gather
from fxshard.precision.mxfp8 import BLOCK
from fxshard.precision.policy import MXFP8, choose_linears

LayoutKind = Literal["rows", "whole"]
LAYOUTS: dict[str, Callable[[Sequence[TensorSpec], int], Layout]] = {"rows": row_layout, "whole": whole_layout}


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

    @property
    def params(self) -> tuple[str, ...]:
        return self.layout.names

    @property
    def resident(self) -> bool:
        """Whether the unsharded parameters stay in memory all the time instead of in the arena."""
        return not self.placement.param or self.layout.ranks == 1

    @property
    def grad_in_arena(self) -> bool:
        """Whether full gradients only exist during backward; otherwise they are written to where they stay."""
        return self.trainable and self.placement.grad and self.layout.ranks > 1

    @property
    def quantized(self) -> bool:
        """Whether products with these parameters run in MXFP8."""
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

    @staticmethod
    def copy_bytes(numel: int) -> int:
        """Bytes of one quantized copy: payload and compact scales."""
        return numel + numel // BLOCK

    @property
    def grad_bytes(self) -> int:
        return self.layout.numel * self.reduce_dtype.itemsize if self.trainable else 0

    def at_rest(self, state_tensors: int = 2) -> BytesPerRank:
        """Bytes one rank holds for this bucket between steps (two state tensors: AdamW)."""
        rest = bytes_at_rest(
            self.placement,
            ranks=self.layout.ranks,
            shard_numel=self.layout.shard_numel,
            param=self.param_dtype,
            master=self.master_dtype,
            reduce=self.reduce_dtype,
            trainable=self.trainable,
            state_tensors=state_tensors,
        )
        if not self.rests_quantized:
            return rest
        masters = self.layout.shard_numel * self.master_dtype.itemsize
        held = self.layout.numel if self.resident else self.layout.shard_numel
        shared = self.master_dtype == self.param_dtype  # the table counts such masters as parameters
        return BytesPerRank(2 * self.copy_bytes(held), rest.grad, rest.state + (masters if shared else 0))


@dataclass(frozen=True)
class Kind:
    """What parameters of one bucket have in common."""

    dtype: torch.dtype
    trainable: bool
    scalar: bool
    quantized: bool


def plan_buckets(
    model: nn.Module,
    units: Iterable[Unit],
    *,
    zero: int,
    ranks: int,
    precision: Precision | None = None,
    layout: LayoutKind = "rows",
) -> tuple[BucketPlan, ...]:
    """One bucket per unit and kind of parameter, in the order in which backward is expected to finish gradients.

    Kinds differ in dtype, in whether they are trained and in whether they are quantized. A scalar has no rows to shard
    and is replicated.
    """
    parameters = dict(model.named_parameters())
    stage = ZERO[zero]
    quantized = choose_linears(model, precision).weights
    mode = precision.mode(zero) if isinstance(precision, MXFP8) else Gather.PLAIN
    plans: list[BucketPlan] = []
    for unit in reversed(list(units)):
        kinds: dict[Kind, list[TensorSpec]] = {}
        for name in unit.params:
            parameter = parameters[name]
            kind = Kind(parameter.dtype, parameter.requires_grad, parameter.ndim == 0, name in quantized)
            # Columnwise blocks run down 32 rows: a boundary between them lets every owner quantize alone.
            cut = BLOCK if kind.quantized else 1
            kinds.setdefault(kind, []).append(TensorSpec(name, tuple(parameter.shape), cut))
        for kind, specs in kinds.items():
            dtype, trainable, scalar = kind.dtype, kind.trainable, kind.scalar
            placement = ZERO[0] if scalar else stage if trainable else Placement(stage.param, False, stage.param)
            sharded = placement.state
            param_dtype, master_dtype, reduce_dtype = _dtypes(dtype, precision)
            suffix = _kind_suffix(kind, among=kinds)
            placed = LAYOUTS[layout](specs, ranks if sharded else 1)
            plans.append(
                BucketPlan(
                    index=len(plans),
                    name=unit.name + suffix,
                    unit=unit.name,
                    layout=placed,
                    placement=placement,
                    param_dtype=param_dtype,
                    master_dtype=master_dtype if trainable else param_dtype,
                    reduce_dtype=reduce_dtype,
                    trainable=trainable,
                    gather=_gather(mode, placed.ranks) if kind.quantized else Gather.PLAIN,
                )
            )
    if not plans:
        raise ConfigError("the model has no parameters: there is nothing to shard")
    return tuple(plans)


def _gather(mode: Gather, ranks: int) -> Gather:
    """What one rank owns alone does not travel: both copies rest there, as in a staged bucket."""
    return Gather.STAGED if mode is Gather.DIRECT and ranks == 1 else mode


def _dtypes(dtype: torch.dtype, precision: Precision | None) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """(compute, master, reduce) dtypes of a parameter that the model holds in ``dtype``."""
    if precision is None or not dtype.is_floating_point:
        return dtype, dtype, dtype
    param = precision.param or dtype
    return param, precision.master or dtype, precision.reduce or param


def _kind_suffix(own: Kind, among: Iterable[Kind]) -> str:
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
        parts.append("mxfp8" if own.quantized else "plain")
    return f" [{', '.join(parts)}]" if parts else ""
