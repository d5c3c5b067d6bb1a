"""The engine: what each schedule event does when it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxshard import _compat
from fxshard.config import Options
from fxshard.errors import PeerError, StateError
from fxshard.events import Kind, Phase
from fxshard.plan.memory import SlotRange
from fxshard.precision import gathered
from fxshard.precision.gathered import Transfer
from fxshard.precision.modes import Copies
from fxshard.runtime.arena import Arena
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.recorder import Recorder
from fxshard.runtime.streams import AllOf, Token, streams_for
from fxshard.runtime.watchdog import Watchdog, failing

Views = tuple[torch.Tensor | None, ...]


@dataclass
class Gathered:
    """An unsharded bucket, or one on its way."""

    transfer: Transfer
    slot: SlotRange | None
    token: Token
    views: Views | None = None
    version: int | None = None
    """The shard's version that an optimizer step gathered ahead of the next forward."""


@dataclass
class Reducing:
    """A full gradient bucket that is filled, then reduced."""

    flat: torch.Tensor
    slot: SlotRange | None
    accumulate: bool
    result: torch.Tensor | None = None
    """This rank's part of the sum, before it goes where gradients stay."""
    token: Token | None = None
    """The full bucket is reduced and free again."""
    settled: Token | None = None
    """The gradient is where it stays: the same, or behind the sum over replicas."""


@dataclass
class Sent:
    """An all-to-all on its way: what it sends must stay alive until what it brings is there."""

    _sends: torch.Tensor
    _brings: torch.Tensor
    _token: Token

    def wait(self) -> torch.Tensor:
        self._token.wait()
        return self._brings


class Engine:
    """Moves buckets between sharded and unsharded. Called by programs only, in the order of the schedule."""

    def __init__(self, buckets: list[Bucket], device: torch.device, options: Options) -> None:
        self.buckets = buckets
        self.options = options
        self.device = device
        self.arena = Arena(device, planned=options.arena)
        self.synchronises = True
        """Whether backward reduces gradients; inside ``no_sync`` it keeps them. Ranks choose alike."""
        self._averages = device.type == "cuda"
        self._streams = streams_for(device)
        self._gathered: dict[int, Gathered] = {}
        self._reducing: dict[int, Reducing] = {}
        self._start: Token | None = None
        self._unsettled: list[Reducing] = []
        self._carries: Mapping[int, SlotRange] = {}
        self.recorder: Recorder | None = None
        """Times what programs do, while there is one."""
        self._owner: object = None
        self._phase: Phase | None = None
        self._watchdog: Watchdog | None = None
        if any(bucket.channels.domain.ranks > 1 for bucket in buckets):
            self._watchdog = Watchdog(dist.get_rank(), _compat.group_timeout())
        self.observed = False
        """Whether operations outside graphs are looked at just now (``eager_reads``); programs step out of that."""

    # -- programs ----------------------------------------------------------------------------------------------------

    def begin(
        self, phase: Phase, arena_bytes: int = 0, owner: object = None, carries: Mapping[int, SlotRange] | None = None
    ) -> None:
        """A program starts. What an earlier forward kept for its backward gives way: that backward gathers again.

        ``owner`` stands for the plan of memory, which a forward and its backward share. In another plan's backward
        the places are others, so nothing may be left in them. ``carries`` are the buckets that an optimizer step behind
        this program gathers for the next run of it. Those that the last step gathered are used if they are still what
        the shards hold.
        """
        carries = carries or {}
        same, self._owner, self._phase = owner is self._owner, owner, phase
        if self.recorder is not None:
            self.recorder.begin(phase)
        if phase is Phase.BACKWARD:
            if not same:
                self._evict()
            self.arena.reserve(arena_bytes)
            return
        for bucket in self.buckets:
            bucket.reclaim_gradient()
        grows = self.options.arena and arena_bytes > self.arena.bytes
        self._evict(keep={} if grows else carries)
        self.arena.reserve(arena_bytes)
        self._carries = carries
        # The first gather may start when the optimizer's writes to the shards are done: they are on this stream.
        self._start = self._streams.mark()

    def end(self) -> None:
        """A program is over: what it reduced is there for whoever comes next."""
        for state in self._unsettled:
            assert state.settled is not None
            state.settled.wait()
        self._unsettled.clear()

    def abort(self) -> None:
        """A program failed half-way: let what it started end and forget what it held: the next starts clean."""
        for state in [*self._reducing.values(), *self._unsettled]:
            for token in (state.token, state.settled):
                if token is not None:
                    # The failure that is being raised may be this very collective.
                    with contextlib.suppress(RuntimeError, PeerError):
                        token.wait()
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

    def _evict(self, keep: Mapping[int, SlotRange] | None = None) -> None:
        """Release every gathered bucket, but for those that the last step gathered and that nothing touched since."""
        for index, held in list(self._gathered.items()):
            untouched = held.views is None and held.version == self.buckets[index].version
            if held.slot is not None and not (untouched and (keep or {}).get(index) == held.slot):
                self.reshard(index)

    # -- the optimizer step ------------------------------------------------------------------------------------------

    def carry(self, index: int) -> None:
        """A bucket has its new values: if the next forward starts by gathering it, that starts now."""
        slot = self._carries.get(index)
        if slot is None:
            return
        if index in self._gathered:  # a second step before the next forward
            self.reshard(index)
        bucket = self.buckets[index]
        memory, pending = self.arena.take(slot)
        self._start = self._streams.mark()
        held = self._gather(bucket, self._transfer(bucket, memory, Copies.NONE), slot, pending)
        held.version = bucket.version
        self._gathered[index] = held

    def exchange(self, index: int, sends: torch.Tensor, to: list[int], from_each: list[int]) -> Sent:
        """Among the ranks that share a bucket, send ``to[r]`` elements to each rank ``r`` and get ``from_each[r]``."""
        brings = torch.empty(sum(from_each), dtype=sends.dtype, device=sends.device)
        group = self.buckets[index].channels.gather

        def swap(async_op: bool) -> dist.Work | None:
            assert group is not None
            return dist.all_to_all_single(brings, sends, from_each, to, group=group, async_op=async_op)

        with self._naming(Kind.EXCHANGE, self.buckets[index]) as watched:
            token = watched(self._streams.launch("gather", swap, after=[self._streams.mark()]))
        if not self.options.overlap:
            token.wait()
        return Sent(sends, brings, token)

    def on_all_ranks(self, condition: torch.Tensor) -> torch.Tensor:
        """Whether something holds on every rank."""
        held = condition.to(self.device, torch.int32)
        for channels in {id(bucket.channels): bucket.channels for bucket in self.buckets}.values():
            channels.all_reduce(held, dist.ReduceOp.MIN)
        return held.bool()

    # -- parameters --------------------------------------------------------------------------------------------------

    def unshard(self, index: int, slot: SlotRange | None, copies: Copies = Copies.NONE) -> None:
        bucket = self.buckets[index]
        plan = bucket.plan
        if plan.resident and not bucket.stale:
            return
        if index in self._gathered and self._gathered[index].version is not None:
            return  # the optimizer step gathered it
        in_arena = not plan.resident or plan.staged_in_arena
        if in_arena and slot is None:
            raise StateError(f"no arena slot is planned for {plan.name!r}: the schedule is incomplete")
        memory, pending = self.arena.take(slot) if in_arena and slot is not None else (None, [])
        transfer = self._transfer(bucket, memory, copies)
        self._gathered[index] = self._gather(bucket, transfer, slot if in_arena else None, pending)

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
        return self._plain(bucket, flat)

    def _plain(self, bucket: Bucket, flat: torch.Tensor) -> Transfer:
        """A gather of the parameters in the dtype they compute in."""
        alone, master, own = bucket.plan.layout.ranks == 1, bucket.master, bucket.own_slice(flat)
        in_place = own.data_ptr() == master.data_ptr()
        send = master if master.dtype == flat.dtype and not alone else own

        def stage() -> None:
            if send is own and not in_place:
                own.copy_(master)

        return Transfer(() if alone else ((flat, send),), lambda: bucket.views(flat), stage)

    def _gather(self, bucket: Bucket, transfer: Transfer, slot: SlotRange | None, after: list[Token]) -> Gathered:
        group = bucket.channels.gather

        def gather(async_op: bool) -> dist.Work | AllOf | None:
            assert group is not None
            works = [_compat.all_gather(to, part, group, async_op=async_op) for to, part in transfer.moves]
            return works[0] if len(works) == 1 else AllOf(works)

        waits = list(after)
        if self._start is not None:
            waits.append(self._start)
        if not self.arena.planned:
            waits.append(self._streams.mark())
        collective = gather if transfer.moves else None
        with self._naming(Kind.UNSHARD, bucket) as watched:
            token = watched(
                self._streams.launch("gather", collective, before=transfer.stage, then=transfer.settle, after=waits)
            )
        if not self.options.overlap:
            token.wait()
        return Gathered(transfer, slot, token)

    def unsharded(self, index: int) -> tuple[torch.Tensor, ...]:
        """Parameters for code outside programs, in memory of their own where they do not stay in memory anyway."""
        bucket = self.buckets[index]
        if bucket.full is not None:
            self.unshard(index, None)
            self.wait(index)
            return bucket.views(bucket.full)
        flat = torch.empty(bucket.plan.layout.numel, dtype=bucket.plan.param_dtype, device=bucket.device)
        self._gather(bucket, self._plain(bucket, flat), None, [self._streams.mark()]).token.wait()
        return bucket.views(flat)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def add_gradient(self, index: int, position: int, gradient: torch.Tensor) -> None:
        """A gradient that autograd accumulated outside programs: averaged over the ranks, added to the shard's."""
        bucket = self.buckets[index]
        with torch.no_grad():
            value = gradient.to(bucket.plan.reduce_dtype).contiguous()
            if bucket.channels.domain.ranks > 1:
                with failing(f"eager reduce of {bucket.plan.params[position]!r}", dist.get_rank()):
                    bucket.channels.all_reduce(value, dist.ReduceOp.SUM)
                value = value / bucket.plan.domain.divisor
            bucket.add_gradient(bucket.plan.params[position], value)

    def grad(self, index: int, slot: SlotRange | None, zeros: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        bucket = self.buckets[index]
        accumulate = not self._keeps(bucket) and bucket.prepare_accumulation()
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
        self._add_kept(bucket, state)
        flat, target, group = state.flat, bucket.hold_gradient(), bucket.channels.reducing(bucket.plan)
        alone = bucket.plan.layout.ranks == 1
        direct = not state.accumulate and flat.dtype == target.dtype
        state.result = flat if alone else target if direct else None
        operation = self._operation(bucket)

        def prepare() -> None:
            if state.result is None:
                state.result = torch.empty(target.numel(), dtype=flat.dtype, device=flat.device)

        def combine(async_op: bool) -> dist.Work | None:
            assert group is not None and state.result is not None
            if alone:
                return dist.all_reduce(flat, op=operation, group=group, async_op=async_op)
            return _compat.reduce_scatter(state.result, flat, operation, group, async_op=async_op)

        with self._naming(Kind.REDUCE, bucket) as watched:
            state.token = watched(
                self._streams.launch(
                    "reduce",
                    combine if group is not None else None,
                    before=prepare,
                    then=None if bucket.plan.adds_replicas else lambda: self._settle(bucket, state),
                    after=[self._streams.mark()],
                )
            )
        if not bucket.plan.adds_replicas:
            state.settled = state.token
        if not self.options.overlap:
            state.token.wait()

    def accumulate(self, index: int) -> None:
        """In place of ``reduce`` inside ``no_sync``: full gradients stay here until a backward reduces them."""
        bucket, state = self.buckets[index], self._reducing[index]
        if not self._keeps(bucket):
            self.reduce(index)
        elif bucket.kept is not None:
            bucket.kept.add_(state.flat)
        else:
            bucket.kept = state.flat.clone() if bucket.plan.grad_in_arena else state.flat

    def put_back(self, index: int) -> None:
        """In place of ``finish`` inside ``no_sync``: the place in the arena is free again."""
        if not self._keeps(self.buckets[index]):
            self.finish(index)
            return
        state = self._reducing.pop(index)
        if state.slot is not None:
            self.arena.release(state.slot, self._streams.mark())

    def _keeps(self, bucket: Bucket) -> bool:
        """Whether full gradients are kept: not where no other rank has any part in them."""
        return not self.synchronises and bucket.channels.reducing(bucket.plan) is not None

    def _add_kept(self, bucket: Bucket, state: Reducing) -> None:
        """Reduce what micro-batches before this one left, along with its own."""
        if bucket.kept is None:
            return
        if bucket.plan.grad_in_arena:
            state.flat.add_(bucket.kept)
        else:
            state.flat = bucket.kept.add_(state.flat)
        bucket.kept = None

    def all_reduce(self, index: int) -> None:
        """The reduced shard is added up over its replicas, on a stream and in a group of its own."""
        bucket, state = self.buckets[index], self._reducing[index]
        assert state.token is not None, f"{bucket.plan.name} is added up before it is reduced"
        group, operation = bucket.channels.replicas, self._operation(bucket)

        def combine(async_op: bool) -> dist.Work | None:
            assert group is not None and state.result is not None
            return dist.all_reduce(state.result, op=operation, group=group, async_op=async_op)

        with self._naming(Kind.ALL_REDUCE, bucket) as watched:
            state.settled = watched(
                self._streams.launch("replicas", combine, then=lambda: self._settle(bucket, state), after=[state.token])
            )
        if not self.options.overlap:
            state.settled.wait()

    def _operation(self, bucket: Bucket) -> dist.ReduceOp.RedOpType:
        """An average where the backend has one and it is what is asked for; else a sum, divided when it is there."""
        domain = bucket.plan.domain
        return dist.ReduceOp.AVG if self._averages and domain.divisor == domain.ranks else dist.ReduceOp.SUM

    def _settle(self, bucket: Bucket, state: Reducing) -> None:
        """Scale the sum and bring it to where gradients stay."""
        result, target, divisor = state.result, bucket.grad, bucket.plan.domain.divisor
        assert result is not None and target is not None
        if divisor != 1 and self._operation(bucket) == dist.ReduceOp.SUM:
            result.div_(divisor)
        if result is not target:
            (target.add_ if state.accumulate else target.copy_)(result)
        if not bucket.plan.adds_replicas:  # scratch belongs to the stream of reductions, which is done with it
            state.result = None

    def finish(self, index: int) -> None:
        state = self._reducing.pop(index)
        assert state.token is not None, f"{self.buckets[index].plan.name} is finished before it is reduced"
        assert state.settled is not None, f"{self.buckets[index].plan.name} is finished before replicas are added up"
        # Kept until the end: scratch memory belongs to the compute stream and the reduction may still read it.
        self._unsettled.append(state)
        if state.slot is not None:
            self.arena.release(state.slot, state.token)
        if not self.arena.planned:
            state.settled.wait()  # the memory goes back to an allocator that knows this stream only
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
        if bucket.kept is None:
            if bucket.grad_full is not None:
                return bucket.grad_full
            if not accumulate and plan.reduce_dtype == plan.master_dtype and not self._keeps(bucket):
                return bucket.hold_gradient()
        return torch.empty(plan.layout.numel, dtype=plan.reduce_dtype, device=bucket.device)
