"""DTensors whose rows are cut otherwise than ``torch.chunk`` cuts them: every operation is right, or refused.

DTensor's rules derive from the number of ranks which rows each holds. fxshard cuts buckets, not parameters, so a rank
may hold any number of rows of one, none included, and by those rules a mean would be a mean of means, and ``p[0]``
would end one rank and leave the others waiting. So what is known to be right on rows runs on rows; what only reads gets
the whole tensor, gathered; views and other writes are refused, on every rank alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.runtime.rows import Rows, rows_of

ROW_BY_ROW = frozenset(
    ["detach", "alias", "lift_fresh", "_to_copy", "clone", "copy_", "zero_", "fill_", "normal_", "uniform_"]
    + ["zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "_fused_adam_", "_fused_adamw_"]
)
"""Operators, besides pointwise ones, that treat every row by itself."""
NEW = frozenset(["new_empty", "new_zeros", "new_ones", "new_full"])
COMPUTED = frozenset(["T", "mT", "H", "mH", "real", "imag", "data"])
"""Attributes that are operators."""
NORMS = frozenset(["linalg_vector_norm", "_foreach_norm"])
NOT_POINTWISE = frozenset(["_foreach_norm", "_foreach_max", "_foreach_powsum"])


@dataclass(frozen=True)
class Cut:
    """How the rows of a tensor are cut."""

    counts: tuple[int, ...] | None
    """Of each rank along one dimension of the mesh; None where this is only part of what a rank holds."""
    along: int
    """That dimension."""
    offsets: tuple[int, ...] = field(compare=False)
    """Where this rank's rows begin in the whole tensor."""


class UnevenRows(DTensor):
    """A DTensor with any number of rows on each rank. The slots are DTensor's: copies for checkpoints go by them."""

    _cut: Cut

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operators that ``func`` calls come to ``_OnRows``: torch 2.11 ignores a subclass's ``__torch_dispatch__``."""
        access = getattr(func, "__name__", "")
        if access == "__set__" or (access == "__get__" and func.__self__.__name__ not in COMPUTED):
            return private.PLAIN_RESULTS(func, types, args, kwargs or {})
        with _OnRows():
            result = private.PLAIN_RESULTS(func, types, args, kwargs or {})
        if _left_rows(result) and any(_is_differentiated(t) for t in tree_leaves((args, kwargs))):
            args, kwargs = tree_map_only(UnevenRows, UnevenRows._differentiable, (args, kwargs or {}))
            return func(*args, **kwargs)
        return result

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor. Collective."""
        return self._differentiable().full_tensor(grad_placements=grad_placements)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As other DTensors, which are cut as torch does it. Collective."""
        return self._differentiable().redistribute(*args, **kwargs)

    def _differentiable(self) -> DTensor:
        """The whole tensor; what is computed from it has gradients for these rows. Collective."""
        return _Whole.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def placements(self) -> tuple[Any, ...]:  # type: ignore[override]
        """As other DTensors have them, to which these are equal. Asked where rows lie, they know it."""
        given = super().placements
        counts, along = self._cut.counts, self._cut.along
        return tuple(private.shard_of_rows(p, counts) if i == along else p for i, p in enumerate(given))

    # -- torch.distributed.checkpoint --------------------------------------------------------------------------------

    def __create_write_items__(self, name: str, tensor: Any) -> list[Any]:
        return self._rows().__create_write_items__(name, tensor)

    def __create_chunk_list__(self) -> list[Any]:
        return self._rows().__create_chunk_list__()

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._rows().__get_tensor_shard__(index)

    def _rows(self) -> Rows:
        local = private.wrapped(self)
        return local if isinstance(local, Rows) else rows_of(local.detach(), self._cut.offsets, self.shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return private.as_dtensor(self).__reduce_ex__(protocol)


class _OnRows(TorchDispatchMode):
    """Decides for every operator on uneven rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, UnevenRows)]
        if not given:
            return func(*args, **kwargs)
        if private.operator_name(func) in NEW and tuple(args[1]) == tuple(args[0].shape):
            local = private.wrapped(args[0])
            made = func(local, list(local.shape), *args[2:], **kwargs)
            return uneven(private.as_dtensor(args[0], made), args[0]._cut)
        groups = _groups(args, kwargs)
        if _is_row_by_row(func, args, kwargs) and all(map(_alike, groups)):
            return _by_rows(func, args, kwargs, groups)
        if private.is_mutable(func) or private.returns_view(func):
            raise StateError(
                f"{private.operator_name(func)} on a sharded parameter, or what was computed from one: ranks hold "
                "uneven numbers of its rows, so it cannot be viewed or written to in this way. Read it with "
                "full_tensor(), and write through load_state_dict, or with operations that treat every element alike"
            )
        args, kwargs = tree_map_only(UnevenRows, whole, (args, kwargs))
        return func(*args, **kwargs)


class _Whole(torch.autograd.Function):
    """The whole tensor, for what is differentiated: autograd runs DTensor's own rules in backward, ours in forward
    only. All ranks compute the same from it, so of its gradient each takes its own rows."""

    @staticmethod
    def forward(ctx: Any, rows: UnevenRows) -> torch.Tensor:
        ctx.rows = rows.detach()
        return whole(rows)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> torch.Tensor:  # type: ignore[override]
        rows, cut = ctx.rows, ctx.rows._cut
        kept = [Replicate() if i == cut.along else p for i, p in enumerate(rows.placements)]
        begin = sum(cut.counts[: rows.device_mesh.get_local_rank(cut.along)])
        own = gradient.redistribute(placements=kept).to_local()[begin : begin + len(private.wrapped(rows))]
        return uneven(private.as_dtensor(rows, own.clone()), cut)


def _left_rows(result: Any) -> bool:
    """Whether autograd has recorded something whose backward does not have the rows of its inputs."""
    if not torch.is_grad_enabled():
        return False
    made = (t for t in tree_leaves(result) if isinstance(t, DTensor))
    return any(t.requires_grad and not isinstance(t, UnevenRows) for t in made)


def _is_differentiated(value: Any) -> bool:
    return isinstance(value, UnevenRows) and value.requires_grad


def tell_gradient(parameter: torch.Tensor) -> None:
    """Let a gradient that autograd accumulated, outside programs, know how its rows are cut: as its parameter's."""
    if isinstance(parameter, UnevenRows) and type(parameter.grad) is DTensor:
        uneven(parameter.grad, parameter._cut)


def uneven(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Let a DTensor know how its rows are cut."""
    tensor.__class__ = UnevenRows
    tensor._cut = cut  # type: ignore[attr-defined]
    return tensor


def whole(rows: UnevenRows) -> DTensor:
    """The same, with the rows of all ranks on each. Collective among them."""
    counts, along, mesh = rows._cut.counts, rows._cut.along, rows.device_mesh
    if counts is None:
        raise StateError("optimizer state that replicas share is in parts on all of them: read it with fxshard.save")
    joined = gather_rows(private.wrapped(rows).detach().as_subclass(torch.Tensor), counts, mesh.get_group(along))
    placements = [Replicate() if i == along else p for i, p in enumerate(rows.placements)]
    return DTensor.from_local(joined, mesh, placements, run_check=False, shape=rows.shape, stride=rows.stride())


def gather_rows(rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks, of which each has as many as ``counts`` says. Collective among them."""
    plain = rows.contiguous()
    sent = plain.view(torch.uint8) if plain.dtype is torch.bool else plain
    padded = sent.new_zeros((max(counts), *sent.shape[1:]))
    padded[: len(sent)] = sent
    gathered = sent.new_empty((len(counts), *padded.shape))
    private.all_gather(gathered.view(-1), padded.view(-1), group, async_op=False)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]).view(plain.dtype)


def _groups(args: Any, kwargs: Any) -> list[list[DTensor]]:
    """Tensors that meet each other: all of an operator, or those at one place in its lists of tensors."""
    lists = [
        a
        for a in (*args, *kwargs.values())
        if isinstance(a, list | tuple) and any(isinstance(t, torch.Tensor) for t in a)
    ]
    met = zip_longest(*lists) if lists else [tree_leaves((args, kwargs))]
    return [[t for t in group if isinstance(t, DTensor) and t.ndim > 0] for group in met]


def _alike(group: Sequence[DTensor]) -> bool:
    """Whether all have the same rows on each rank, as far as every rank can tell; or are cut as torch does it."""
    return len({(tuple(t.shape), t._cut) if isinstance(t, UnevenRows) else None for t in group}) <= 1


def _is_row_by_row(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    name = private.operator_name(func)
    if name in NORMS:  # of all elements, and of none, on a rank without rows
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return len(args) < 3 and not kwargs.get("dim") and 0 < order < math.inf
    if name in ROW_BY_ROW or func is torch.ops.aten.sum.default:
        return True
    return torch.Tag.pointwise in func.tags or (name.startswith("_foreach_") and name not in NOT_POINTWISE)


def _by_rows(func: Any, args: Any, kwargs: Any, groups: Iterable[Sequence[DTensor]]) -> Any:
    plain_args, plain_kwargs = tree_map_only(UnevenRows, private.as_dtensor, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if private.is_mutable(func):
        return None if result is None else args[0]
    results = result if isinstance(result, list | tuple) else [result]
    for made, group in zip(results, groups, strict=False):
        like = group[0] if group else None
        if isinstance(like, UnevenRows) and isinstance(made, DTensor) and made.shape == like.shape:
            uneven(made, like._cut)
    return result
