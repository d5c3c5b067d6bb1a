"""Buckets: one unit's parameters of one kind, in one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fxshard.config import Precision
from fxshard.errors import ConfigError
from fxshard.plan.domain import UNKNOWN, Domain, DomainOf
from fxshard.plan.layout import Layout, TensorSpec
from fxshard.plan.placement import ZERO, BytesPerRank, Placement, bytes_at_rest
from fxshard.plan.rows import row_layout
from fxshard.plan.units import Unit
from fxshard.plan.whole import whole_layout

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
    domain: Domain = UNKNOWN

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
    def adds_replicas(self) -> bool:
        """Whether a reduced shard is added up over its replicas by a collective of its own (HSDP).

        What is not sharded needs none: its one all-reduce is over all ranks.
        """
        return self.trainable and self.layout.ranks > 1 and self.domain.replicas > 1

    @property
    def reducing_ranks(self) -> int:
        """Ranks that a reduction of full gradients runs over: the shards, or everyone where there is one shard."""
        return self.layout.ranks if self.layout.ranks > 1 else self.domain.ranks

    def group(self, default: str, *, replicas: bool = False) -> str:
        """What a schedule calls the process group of this bucket's collectives, or of those over its replicas."""
        if not self.domain.device:
            return default
        return (
            self.domain.group(self.domain.replicas, "replicas") if replicas else self.domain.group(self.reducing_ranks)
        )

    @property
    def gathered_bytes(self) -> int:
        return self.layout.numel * self.param_dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        return self.layout.numel * self.reduce_dtype.itemsize if self.trainable else 0

    def at_rest(self, state_tensors: int = 2) -> BytesPerRank:
        """Bytes one rank holds for this bucket between steps (two state tensors: AdamW)."""
        return bytes_at_rest(
            self.placement,
            ranks=self.layout.ranks,
            shard_numel=self.layout.shard_numel,
            param=self.param_dtype,
            master=self.master_dtype,
            reduce=self.reduce_dtype,
            trainable=self.trainable,
            state_tensors=state_tensors,
        )


def plan_buckets(
    model: nn.Module,
    units: Iterable[Unit],
    *,
    zero: int,
    ranks: int,
    precision: Precision | None = None,
    layout: LayoutKind = "rows",
    domain_of: DomainOf | None = None,
) -> tuple[BucketPlan, ...]:
    """One bucket per unit and kind of parameter, in the order in which backward is expected to finish gradients.

    Kinds differ in dtype, in whether they are trained, and in the ranks they are data-parallel over (by default
    ``ranks`` shards). A scalar has no rows to shard and is replicated.
    """
    own = Domain(ranks, divisor=ranks)
    parameters = dict(model.named_parameters())
    stage = ZERO[zero]
    plans: list[BucketPlan] = []
    for unit in reversed(list(units)):
        kinds: dict[tuple[torch.dtype, bool, bool, Domain], list[TensorSpec]] = {}
        for name in unit.params:
            parameter = parameters[name]
            domain = domain_of(name) if domain_of is not None else own
            kind = (parameter.dtype, parameter.requires_grad, parameter.ndim == 0, domain)
            kinds.setdefault(kind, []).append(TensorSpec(name, tuple(parameter.shape)))
        for (dtype, trainable, scalar, domain), specs in kinds.items():
            placement = ZERO[0] if scalar else stage if trainable else Placement(stage.param, False, stage.param)
            sharded = placement.state
            param_dtype, master_dtype, reduce_dtype = _dtypes(dtype, precision)
            suffix = _kind_suffix(dtype, trainable, scalar, domain, among=kinds)
            plans.append(
                BucketPlan(
                    index=len(plans),
                    name=unit.name + suffix,
                    unit=unit.name,
                    layout=LAYOUTS[layout](specs, domain.shards if sharded else 1),
                    placement=placement,
                    param_dtype=param_dtype,
                    master_dtype=master_dtype if trainable else param_dtype,
                    reduce_dtype=reduce_dtype,
                    trainable=trainable,
                    domain=domain,
                )
            )
    if not plans:
        raise ConfigError("the model has no parameters: there is nothing to shard")
    return tuple(plans)


def _dtypes(dtype: torch.dtype, precision: Precision | None) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """(compute, master, reduce) dtypes of a parameter that the model holds in ``dtype``."""
    if precision is None or not dtype.is_floating_point:
        return dtype, dtype, dtype
    param = precision.param or dtype
    return param, precision.master or dtype, precision.reduce or param


def _kind_suffix(
    dtype: torch.dtype,
    trainable: bool,
    scalar: bool,
    domain: Domain,
    among: Iterable[tuple[torch.dtype, bool, bool, Domain]],
) -> str:
    """A suffix that tells the buckets of one unit apart; empty where the unit has only one."""
    kinds = list(among)
    parts = []
    if len({kind[0] for kind in kinds}) > 1:
        parts.append(str(dtype).removeprefix("torch."))
    if len({kind[1] for kind in kinds}) > 1:
        parts.append("trained" if trainable else "frozen")
    if len({kind[2] for kind in kinds}) > 1:
        parts.append("scalar" if scalar else "tensor")
    if domain.name:
        parts.append(domain.name)
    return f" [{', '.join(parts)}]" if parts else ""
