"""The engine: what each schedule event does when it runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxshard import _compat
from fxshard.config import Options
from fxshard.errors import StateError
from fxshard.events import Phase
from fxshard.plan.memory import SlotRange
from fxshard.precision import gathered
from fxshard.precision.gathered import Transfer
from fxshard.precision.modes import Copies
from fxshard.runtime.arena import Arena
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.streams import AllOf, Token, streams_for

Views = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Groups:
    """The ranks, once for gathers and once for reductions."""

    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup


@dataclass
class Gathered:
    """An unsharded bucket, or one on its way."""

    transfer: Transfer
    slot: SlotRange | None
    token: Token
    views: Views | None = None


@dataclass
class Reducing:
    """A full gradient bucket that is filled, then reduced."""

    flat: torch.Tensor
    slot: SlotRange | None
    accumulate: bool
    token: Token | None = None


class Engine:
    """Moves buckets between sharded and unsharded. Called by programs only, in the order of the schedule."""

    def __init__(self, buckets: list[Bucket], groups: Groups | None, device: torch.device, options: Options) -> None:
        self.buckets = buckets
        self.options = options
        self.arena = Arena(device, planned=options.arena)
        self._groups = groups
        self._ranks = groups.gather.size() if groups is not None else 1
        self._averages = groups is not None and device.type == "cuda"
        self._streams = streams_for(device)
        self._gathered: dict[int, Gathered] = {}
        self._reducing: dict[int, Reducing] = {}
        self._start: Token | None = None
        self._unsettled: list[Reducing] = []

    # -- programs ----------------------------------------------------------------------------------------------------

    def begin(self, phase: Phase) -> None:
        """A program starts. What an earlier forward kept for its backward gives way: that backward gathers again."""
        if phase is Phase.BACKWARD:
            return
        for bucket in self.buckets:
            bucket.release_gradient()
        self._evict()
        # The first gather may start when the optimizer's writes to the shards are done: they are on this stream.
        self._start = self._streams.mark()

    def end(self) -> None:
        """A program is over: what it reduced is there for whoever comes next."""
        for state in self._unsettled:
            assert state.token is not None
            state.token.wait()
        self._unsettled.clear()

    def abort(self) -> None:
        """A program failed half-way: let what it started end and forget what it held: the next starts clean."""
        for state in [*self._reducing.values(), *self._unsettled]:
            if state.token is not None:
                with contextlib.suppress(RuntimeError):  # the failure that is being raised may be this very collective
                    state.token.wait()
            if state.slot is not None:
                self.arena.release(state.slot, self._streams.mark())
        self._reducing.clear()
        self._unsettled.clear()
        self._evict()

    def _evict(self) -> None:
        for index in [index for index, held in self._gathered.items() if held.slot is not None]:
            self.reshard(index)

    # -- parameters --------------------------------------------------------------------------------------------------

    def unshard(self, index: int, slot: SlotRange | None, copies: Copies = Copies.NONE) -> None:
        bucket = self.buckets[index]
        plan = bucket.plan
        if plan.resident and not bucket.stale:
            return
        in_arena = not plan.resident or plan.staged_in_arena
        if in_arena and slot is None:
            raise StateError(f"no arena slot is planned for {plan.name!r}: the schedule is incomplete")
        memory, pending = self.arena.take(slot) if in_arena and slot is not None else (None, [])
        transfer = self._transfer(bucket, memory, copies)
        self._gathered[index] = self._gather(transfer, slot if in_arena else None, pending)

    def wait(self, index: int, slot: SlotRange | None = None, copies: Copies = Copies.NONE) -> Views:
        bucket = self.buckets[index]
        if index not in self._gathered:
            if bucket.plan.resident:
                transfer = Transfer((), bucket.resident_views)
                self._gathered[index] = Gathered(transfer, None, self._streams.mark(), transfer.views())
            else:  # kept since forward, but another program needed the place in between
                self.unshard(index, slot, copies)
        held = self._gathered[index]
        if held.views is None:
            held.token.wait()
            if bucket.plan.resident:
                # Only now: gloo copies into the buffer from a thread of its own, and a copy counts as a change.
                bucket.gathered()
            held.views = self.arena.views(("gathered", index, held.slot, copies), held.transfer.views)
            if bucket.plan.staged_in_arena and held.slot is not None:
                self.arena.release(held.slot, held.token)  # quantized: the staging buffer is free
                held.slot = None
        return held.views

    def reshard(self, index: int) -> None:
        held = self._gathered.pop(index)
        if held.slot is not None:
            self.arena.release(held.slot, self._streams.mark() if held.views is not None else held.token)

    def _transfer(self, bucket: Bucket, memory: torch.Tensor | None, copies: Copies) -> Transfer:
        """What a gather of the bucket moves, into ``memory`` where it is not resident."""
        plan, resting, master = bucket.plan, bucket.copies, bucket.master
        alone = plan.layout.ranks == 1
        if resting is not None:
            if alone:
                return gathered.alone(resting, master)
            if plan.staged:
                staging = (memory if memory is not None else bucket.staging()).view(plan.param_dtype)
                return gathered.staged(resting, master, staging, bucket.own_slice(staging))
            assert memory is not None
            stale = bucket.stale
            bucket.gathered()  # the shard's copies, which stay, are made anew by this transfer
            return gathered.direct(resting, master, memory, plan.layout.numel, copies, stale)
        flat = memory.view(plan.param_dtype) if memory is not None else bucket.full
        assert flat is not None
        own = bucket.own_slice(flat)
        in_place = own.data_ptr() == master.data_ptr()
        send = master if master.dtype == flat.dtype and not alone else own

        def stage() -> None:
            if send is own and not in_place:
                own.copy_(master)

        return Transfer(() if alone else ((flat, send),), lambda: bucket.views(flat), stage)

    def _gather(self, transfer: Transfer, slot: SlotRange | None, after: list[Token]) -> Gathered:
        groups = self._groups

        def gather(async_op: bool) -> dist.Work | AllOf | None:
            assert groups is not None
            works = [_compat.all_gather(to, part, groups.gather, async_op=async_op) for to, part in transfer.moves]
            return works[0] if len(works) == 1 else AllOf(works)

        waits = list(after)
        if self._start is not None:
            waits.append(self._start)
        if not self.arena.planned:
            waits.append(self._streams.mark())
        collective = gather if transfer.moves else None
        token = self._streams.launch("gather", collective, before=transfer.stage, then=transfer.settle, after=waits)
        if not self.options.overlap:
            token.wait()
        return Gathered(transfer, slot, token)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def grad(self, index: int, slot: SlotRange | None, zeros: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        bucket = self.buckets[index]
        accumulate = bucket.prepare_accumulation()
        flat = self._gradient_target(bucket, slot, accumulate)
        self._reducing[index] = Reducing(flat, slot, accumulate)
        views = self.arena.views(("gradient", index, slot), lambda: bucket.views(flat)) if slot else bucket.views(flat)
        for start, numel in bucket.gaps:
            flat[start : start + numel].zero_()
        for i in zeros:
            views[i].zero_()
        return views

    def reduce(self, index: int) -> None:
        bucket, state = self.buckets[index], self._reducing[index]
        flat, target, groups = state.flat, bucket.hold_gradient(), self._groups
        alone = bucket.plan.layout.ranks == 1
        direct = not state.accumulate and flat.dtype == target.dtype
        result = flat if alone else target if direct else None
        operation = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM

        def prepare() -> None:
            nonlocal result
            if result is None:
                result = torch.empty(target.numel(), dtype=flat.dtype, device=flat.device)

        def combine(async_op: bool) -> dist.Work | None:
            assert groups is not None and result is not None
            if alone:
                return dist.all_reduce(flat, op=operation, group=groups.reduce, async_op=async_op)
            return _compat.reduce_scatter(result, flat, operation, groups.reduce, async_op=async_op)

        def settle() -> None:
            assert result is not None
            if self._ranks > 1 and not self._averages:
                result.div_(self._ranks)
            if result is not target:
                (target.add_ if state.accumulate else target.copy_)(result)

        state.token = self._streams.launch(
            "reduce", combine if self._ranks > 1 else None, before=prepare, then=settle, after=[self._streams.mark()]
        )
        if not self.options.overlap:
            state.token.wait()

    def finish(self, index: int) -> None:
        state = self._reducing.pop(index)
        assert state.token is not None, f"{self.buckets[index].plan.name} is finished before it is reduced"
        # Kept until the end: scratch memory belongs to the compute stream and the reduction may still read it.
        self._unsettled.append(state)
        if state.slot is not None:
            self.arena.release(state.slot, state.token)
        if not self.arena.planned:
            state.token.wait()  # the memory goes back to an allocator that knows this stream only
        self.buckets[index].publish_gradients()

    def _gradient_target(self, bucket: Bucket, slot: SlotRange | None, accumulate: bool) -> torch.Tensor:
        """Where backward writes full gradients: the arena, the place they stay, or scratch beside gradients there."""
        plan = bucket.plan
        if plan.grad_in_arena:
            assert slot is not None, f"no arena slot is planned for the gradients of {plan.name}"
            memory, pending = self.arena.take(slot)
            for token in pending:
                token.wait()
            return memory.view(plan.reduce_dtype)
        if bucket.grad_full is not None:
            return bucket.grad_full
        if not accumulate and plan.reduce_dtype == plan.master_dtype:
            return bucket.hold_gradient()
        return torch.empty(plan.layout.numel, dtype=plan.reduce_dtype, device=bucket.device)
