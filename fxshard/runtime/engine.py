"""The engine: what each schedule event does when it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxshard import _compat
from fxshard.config import Options
from fxshard.errors import PeerError, StateError
from fxshard.events import Kind, Phase
from fxshard.plan.memory import SlotRange
from fxshard.runtime.arena import Arena
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.streams import Token, streams_for
from fxshard.runtime.watchdog import Watchdog, failing


@dataclass(frozen=True)
class Groups:
    """The ranks, once for gathers and once for reductions."""

    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup


@dataclass
class Gathered:
    """An unsharded bucket, or one on its way."""

    flat: torch.Tensor
    slot: SlotRange | None
    token: Token
    views: tuple[torch.Tensor, ...] | None = None


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
        self._owner: object = None
        self._phase: Phase | None = None
        self._watchdog = None
        if groups is not None:
            self._watchdog = Watchdog(dist.get_rank(), _compat.group_timeout(groups.gather))
        self.observed = False
        """Whether operations outside graphs are looked at just now (``eager_reads``); programs step out of that."""

    # -- programs ----------------------------------------------------------------------------------------------------

    def begin(self, phase: Phase, owner: object) -> None:
        """A program starts. What an earlier forward kept for its backward gives way: that backward gathers again.

        ``owner`` stands for the plan of memory, which a forward and its backward share. In another plan's backward
        the places are others, so nothing may be left in them.
        """
        same, self._owner, self._phase = owner is self._owner, owner, phase
        if phase is Phase.BACKWARD:
            if not same:
                self._evict()
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
                # The failure that is being raised may be this very collective.
                with contextlib.suppress(RuntimeError, PeerError):
                    state.token.wait()
            if state.slot is not None:
                self.arena.release(state.slot, self._streams.mark())
        self._reducing.clear()
        self._unsettled.clear()
        self._evict()

    @contextlib.contextmanager
    def _naming(self, kind: Kind, bucket: Bucket) -> Iterator[Callable[[Token], Token]]:
        """Say which event it is when starting a collective fails, or when what was started fails or does not end."""
        event = f"{self._phase or 'eager'} {kind} of {bucket.plan.name!r}"
        watchdog = self._watchdog
        if watchdog is None:
            yield lambda token: token
            return
        with failing(event, watchdog.rank):
            yield lambda token: watchdog.watch(token, event)

    def _evict(self) -> None:
        for index in [index for index, held in self._gathered.items() if held.slot is not None]:
            self.reshard(index)

    # -- parameters --------------------------------------------------------------------------------------------------

    def unshard(self, index: int, slot: SlotRange | None) -> None:
        bucket = self.buckets[index]
        if bucket.plan.resident:
            if bucket.stale:
                assert bucket.full is not None
                self._gathered[index] = self._gather(bucket, bucket.full, None, [])
            return
        if slot is None:
            raise StateError(f"no arena slot is planned for {bucket.plan.name!r}: the schedule is incomplete")
        memory, pending = self.arena.take(slot)
        self._gathered[index] = self._gather(bucket, memory.view(bucket.plan.param_dtype), slot, pending)

    def wait(self, index: int, slot: SlotRange | None = None) -> tuple[torch.Tensor, ...]:
        bucket = self.buckets[index]
        if index not in self._gathered:
            if bucket.full is not None:
                views = bucket.views(bucket.full)
                self._gathered[index] = Gathered(bucket.full, None, self._streams.mark(), views)
            else:  # kept since forward, but another program needed the place in between
                self.unshard(index, slot)
        held = self._gathered[index]
        if held.views is None:
            held.token.wait()
            # Only now: gloo copies into the buffer from a thread of its own, and a copy counts as a change.
            bucket.gathered()
            key = ("gathered", index, held.slot)
            held.views = self.arena.views(key, lambda: bucket.views(held.flat))
        return held.views

    def reshard(self, index: int) -> None:
        held = self._gathered.pop(index)
        if held.slot is not None:
            self.arena.release(held.slot, self._streams.mark() if held.views is not None else held.token)

    def _gather(self, bucket: Bucket, flat: torch.Tensor, slot: SlotRange | None, after: list[Token]) -> Gathered:
        own, master = bucket.own_slice(flat), bucket.master
        in_place = own.data_ptr() == master.data_ptr()
        alone = bucket.plan.layout.ranks == 1
        send = master if master.dtype == flat.dtype and not alone else own
        groups = self._groups

        def stage() -> None:
            if send is own and not in_place:
                own.copy_(master)

        def gather(async_op: bool) -> dist.Work | None:
            assert groups is not None
            return _compat.all_gather(flat, send, groups.gather, async_op=async_op)

        waits = list(after)
        if self._start is not None:
            waits.append(self._start)
        if not self.arena.planned:
            waits.append(self._streams.mark())
        with self._naming(Kind.UNSHARD, bucket) as watched:
            token = watched(self._streams.launch("gather", None if alone else gather, before=stage, after=waits))
        if not self.options.overlap:
            token.wait()
        return Gathered(flat, slot, token)

    def unsharded(self, index: int) -> tuple[torch.Tensor, ...]:
        """Parameters for code outside programs, in memory of their own where they do not stay in memory anyway."""
        bucket = self.buckets[index]
        if bucket.plan.resident:
            self.unshard(index, None)
            return self.wait(index)
        flat = torch.empty(bucket.plan.layout.numel, dtype=bucket.plan.param_dtype, device=bucket.device)
        self._gather(bucket, flat, None, [self._streams.mark()]).token.wait()
        return bucket.views(flat)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def add_gradient(self, index: int, position: int, gradient: torch.Tensor) -> None:
        """A gradient that autograd accumulated outside programs: averaged over the ranks, added to the shard's."""
        bucket = self.buckets[index]
        with torch.no_grad():
            value = gradient.to(bucket.plan.reduce_dtype).contiguous()
            if self._groups is not None:
                with failing(f"eager reduce of {bucket.plan.params[position]!r}", dist.get_rank()):
                    dist.all_reduce(value, group=self._groups.reduce)
                value = value / self._ranks
            bucket.add_gradient(bucket.plan.params[position], value)

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

        start = combine if self._ranks > 1 else None
        with self._naming(Kind.REDUCE, bucket) as watched:
            state.token = watched(
                self._streams.launch("reduce", start, before=prepare, then=settle, after=[self._streams.mark()])
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
