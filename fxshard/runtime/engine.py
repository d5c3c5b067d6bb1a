"""The engine: what each schedule event does when it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.passes.options import Options
from fxshard.planner import gathered
from fxshard.planner.float8_copies import Float8Copies
from fxshard.planner.gather_modes import Copies
from fxshard.planner.gathered import Transfer, Views
from fxshard.planner.memory import SlotRange
from fxshard.runtime.agreement import Agreement
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.cuda_tape import CudaTape
from fxshard.runtime.frame import Frame
from fxshard.runtime.largest_logits import LargestLogits
from fxshard.runtime.offloads import Offloads
from fxshard.runtime.recorder import Recorder
from fxshard.runtime.reductions import Reductions
from fxshard.runtime.replay import Replays
from fxshard.runtime.streams import AllOf, Token
from fxshard.runtime.unseen import Unseen
from fxshard.runtime.weight_scales import WeightScales
from fxshard.schedule.events import TENSOR, Event, Kind, Phase


@dataclass
class Gathered:
    """An unsharded bucket, or one that is being gathered."""

    transfer: Transfer
    slot: SlotRange | None
    token: Token
    views: Views | None = None
    copies: Copies = Copies.NONE
    """Which quantized copies it brings."""
    version: int | None = None
    """The shard's version that an optimizer step gathered ahead of the next forward."""


@dataclass
class Sent:
    """An all-to-all in flight: what it sends must stay alive until what it receives is there."""

    _sends: torch.Tensor
    _brings: torch.Tensor
    _token: Token

    def wait(self) -> torch.Tensor:
        self._token.wait()
        return self._brings


class Engine:
    """Moves buckets between sharded and unsharded. Called by programs only, in the order of the schedule."""

    def __init__(
        self, buckets: list[Bucket], device: torch.device, options: Options, agreement: Agreement | None = None
    ) -> None:
        self.buckets = buckets
        self.device = device
        self.frame = Frame(buckets, device, options)
        self.arena, self._streams = self.frame.arena, self.frame.streams
        self.gradients = Reductions(self.frame, agreement)
        self.offloads = Offloads(self.frame)
        self._unseen = Unseen(self._streams, device)
        self._scales = WeightScales(buckets, device)
        self.logits = LargestLogits()
        self._gathered: dict[int, Gathered] = {}
        self._start: Token | None = None
        self._carries: Mapping[int, Event] = {}
        self.recorder: Recorder | None = None
        """Times what programs do, while there is one."""
        self._owner: object = None
        self.replays = Replays(CudaTape(device)) if options.cuda_graphs else None
        """Captured programs, where they are wanted."""
        self.observed = False
        """Whether operations outside graphs are looked at just now (``eager_reads``); programs step out of that."""
        self.lends = False
        """Whether a method of the model runs just now that gets weights where it uses them (``borrowed``)."""

    # -- programs ----------------------------------------------------------------------------------------------------

    def begin(
        self, phase: Phase, arena_bytes: int = 0, owner: object = None, carries: Mapping[int, Event] | None = None
    ) -> None:
        """A program starts. What an earlier forward kept for its backward is dropped: that backward gathers again.

        ``owner`` stands for the plan of memory, which a forward and its backward share. In another plan's backward
        the places are others, so nothing may be left in them. ``carries`` are the gathers, by bucket, that an optimizer
        step after this program starts for the next run of it. What the last step gathered is used if it is still what
        the shards hold.
        """
        carries = carries or {}
        same, self._owner, self.frame.phase = owner is self._owner, owner, phase
        if self.recorder is not None:
            self.recorder.begin(phase)
        for bucket in self.buckets:
            bucket.reclaim_gradient()  # in backward as well: many loops clear gradients between the two
        if phase is Phase.BACKWARD:
            if not same:
                self._drop()
            for index in [index for index, held in self._gathered.items() if held.version is not None]:
                if self._gathered[index].views is None:  # a step before this backward: the place is backward's
                    self.reshard(index)
            self.arena.reserve(arena_bytes)
            return
        grows = self.arena.planned and arena_bytes > self.arena.bytes
        self._keep_carried({} if grows else carries)
        self._evict()
        self._unseen.compare(bucket for bucket in self.buckets if self._uses_earlier(bucket))
        self.arena.reserve(arena_bytes)
        self._carries = carries
        self._scales.refresh(phase)
        # The first gather may start when the optimizer's writes to the shards are done: they are on this stream.
        self._start = self._streams.mark()

    def end(self) -> None:
        """A program is over: what it reduced is there for what runs next."""
        self.gradients.end()

    def settle(self) -> None:
        """What comes next on this stream comes after everything that was started."""
        for token in {id(held.token): held.token for held in self._gathered.values()}.values():
            token.wait()
        self.arena.wait()

    def rebase(self, token: Token) -> None:
        """Everything that was started is over when ``token`` is, and nothing else needs to be known about it."""
        self._start = token
        for held in self._gathered.values():
            held.token = token
        self.arena.occupy(token)

    def abort(self) -> None:
        """A program failed half-way: let what it started end and forget what it held: the next starts clean."""
        self.gradients.abort()
        self.offloads.abort()
        self._drop()

    def _keep_carried(self, places: Mapping[int, Event]) -> None:
        """What the last step gathered is used, wherever this program needs it: ranks may run different programs, and
        must all gather again, or none. Only a change of the shard, which all see, makes it worthless.
        """
        for index, held in self._gathered.items():
            fresh = held.version is not None and held.version == self.buckets[index].version
            if not fresh or held.views is not None:
                held.version = None
            elif index not in places or places[index].slot != held.slot:
                held.token.wait()
                assert held.slot is not None and held.transfer.apart is not None
                self.arena.release(held.slot, self._streams.mark())
                held.views, held.slot = held.transfer.apart(), None

    def _uses_earlier(self, bucket: Bucket) -> bool:
        """Whether a program that starts now does not gather a bucket, because it was gathered before."""
        if bucket.plan.resident or bucket.copies is not None:
            return bucket.lags and not bucket.stale
        held = self._gathered.get(bucket.plan.index)
        return held is not None and held.version is not None

    def _drop(self) -> None:
        """Release everything that does not stay in memory."""
        for held in self._gathered.values():
            held.version = None
        self._evict()

    def _evict(self) -> None:
        """Release every gathered bucket, but for those that stay in memory, or were carried here."""
        for index, held in list(self._gathered.items()):
            if held.version is None and (held.slot is not None or not self.buckets[index].plan.resident):
                self.reshard(index)

    # -- the optimizer step ------------------------------------------------------------------------------------------

    def carry(self, index: int) -> None:
        """A bucket has its new values: if the next forward starts by gathering it, that starts now."""
        bucket, event = self.buckets[index], self._carries.get(index)
        if bucket.copies is not None and not bucket.plan.resident:
            bucket.changed()  # its copies are those of the old values, and the kernels that wrote the new do not count
        if event is None or self.recorder is not None:  # gathers are measured where programs start them
            return
        slot = event.slot
        assert slot is not None
        for other, held in list(self._gathered.items()):
            # What a forward without backward keeps is dropped: its backward gathers again. So is an earlier step's.
            if other == index or (held.slot is not None and held.slot.overlaps(slot)):
                self.reshard(other)
        memory, pending = self.arena.take(slot)
        self._start, self.frame.phase = self._streams.mark(), Phase.OPTIMIZER
        held = self._gather(bucket, self._transfer(bucket, memory, event.copies), slot, pending)
        held.copies, held.version = event.copies, bucket.version
        self._unseen.gathered(bucket)
        self._gathered[index] = held

    def exchange(
        self, index: int, sends: torch.Tensor, to: list[int], from_each: list[int], stream: str = "gather"
    ) -> Sent:
        """Among the ranks that share a bucket, send ``to[r]`` elements to each rank ``r`` and get ``from_each[r]``.

        On the stream ``tensor``: among the tensor-parallel ranks that have the other parts of its parameters.
        """
        self.frame.phase = Phase.OPTIMIZER
        brings = torch.empty(sum(from_each), dtype=sends.dtype, device=sends.device)
        channels = self.buckets[index].channels
        group = channels.tensor.group if stream == TENSOR and channels.tensor is not None else channels.gather

        def swap(async_op: bool) -> dist.Work | None:
            assert group is not None
            return dist.all_to_all_single(brings, sends, from_each, to, group=group, async_op=async_op)

        with self.frame.naming(Kind.EXCHANGE, self.buckets[index]) as watched:
            token = watched(self._streams.launch(stream, swap, after=[self._streams.mark()]))
        return Sent(sends, brings, self.frame.launched(token))

    def share(self, index: int, parts: list[tuple[int, int]]) -> None:
        """Among replicas of a shard, bring the stretches that each of them updated to all."""
        self.frame.phase = Phase.OPTIMIZER
        bucket = self.buckets[index]
        group, own = bucket.channels.replicas, bucket.channels.replica
        longest = max(end - begin for begin, end in parts)
        sends = bucket.master.new_zeros(longest)
        sends[: parts[own][1] - parts[own][0]].copy_(bucket.master[slice(*parts[own])])
        brings = bucket.master.new_empty(len(parts) * longest)

        def collect(async_op: bool) -> dist.Work | None:
            assert group is not None
            return private.all_gather(brings, sends, group, async_op=async_op)

        with self.frame.naming(Kind.EXCHANGE, bucket) as watched:
            token = watched(self._streams.launch("replicas", collect, after=[self._streams.mark()]))
        brought = Sent(sends, brings, self.frame.launched(token)).wait().view(len(parts), longest)
        for replica, (begin, end) in enumerate(parts):
            if replica != own:
                bucket.master[begin:end].copy_(brought[replica, : end - begin])

    def on_all_ranks(self, condition: torch.Tensor, what: str) -> torch.Tensor:
        """Whether something holds on every rank. ``what`` it is, in words, for the error of a rank that is left alone.

        For optimizers, in their step.
        """
        return self._over_ranks(condition.to(self.device, torch.int32), dist.ReduceOp.MIN, what).bool()

    def largest_on_all_ranks(self, values: torch.Tensor, what: str, own: Sequence[bool]) -> torch.Tensor:
        """The largest of all ranks' values, one by one. For optimizers, in their step.

        ``own``, for each: whether other tensor-parallel ranks have something else in its place.
        """
        if not any(own):
            return self._over_ranks(values, dist.ReduceOp.MAX, what)
        found = self._over_ranks(values, dist.ReduceOp.MAX, what, tensor=False)
        if all(own):
            return found
        apart = torch.tensor(own, device=values.device)
        return torch.where(apart, found, self._over_ranks(found.clone(), dist.ReduceOp.MAX, what))

    def _over_ranks(
        self, value: torch.Tensor, operation: dist.ReduceOp.RedOpType, what: str, *, tensor: bool = True
    ) -> torch.Tensor:
        for channels in {id(bucket.channels): bucket.channels for bucket in self.buckets}.values():
            channels.all_reduce(value, operation, f"{Phase.OPTIMIZER} all_reduce of {what}", tensor=tensor)
        return value

    # -- parameters --------------------------------------------------------------------------------------------------

    def unshard(self, index: int, slot: SlotRange | None, copies: Copies = Copies.NONE) -> None:
        bucket = self.buckets[index]
        plan = bucket.plan
        if plan.resident and not bucket.stale:
            return
        held = self._gathered.get(index)
        if held is not None and held.version is not None:
            if held.copies.covers(copies):
                return  # the optimizer step gathered it
            self.reshard(index)  # for a program that reads other copies; the ranks agreed on which programs do
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
                self.note_gathered(bucket)
            held.views = self.arena.views(("gathered", index, held.slot, copies), held.transfer.views)
            if bucket.plan.staged_in_arena and held.slot is not None:
                self.arena.release(held.slot, held.token)  # quantized: the staging buffer is free
                held.slot = None
        return held.views

    def note_gathered(self, bucket: Bucket) -> None:
        """A bucket that stays in memory holds what the shards hold now."""
        rests_float8 = isinstance(bucket.copies, Float8Copies)  # the copies themselves say what was quantized
        if bucket.lags and bucket.stale and not self.frame.capturing and not rests_float8:
            self._unseen.gathered(bucket)
        bucket.gathered()

    def reshard(self, index: int) -> None:
        held = self._gathered.pop(index)
        if held.views is None and not self.arena.planned:
            held.token.wait()  # the memory goes back to an allocator that knows this stream only
        if held.slot is not None:
            self.arena.release(held.slot, self._streams.mark() if held.views is not None else held.token)

    def _transfer(self, bucket: Bucket, memory: torch.Tensor | None, copies: Copies) -> Transfer:
        """What a gather of the bucket moves, into ``memory`` where it is not resident."""
        plan, resting, master = bucket.plan, bucket.copies, bucket.master
        alone = plan.layout.ranks == 1
        if isinstance(resting, Float8Copies):
            stale = bucket.stale
            if stale and not self._scales.are_of(bucket):
                self._scales.refresh(self.frame.phase)  # changed since this program began
                self._start = self._streams.mark()  # what quantizes on another stream comes after
            if memory is not None:
                self.note_gathered(bucket)
            return resting.transfer(master, memory, copies, stale)
        if resting is not None:
            if alone:
                return gathered.alone(resting, master)
            if plan.staged:
                staging = (memory if memory is not None else bucket.staging()).view(plan.param_dtype)
                return gathered.staged(resting, master, staging, bucket.own_slice(staging))
            assert memory is not None
            stale = bucket.stale
            self.note_gathered(bucket)  # the shard's copies, which stay, are made anew by this transfer
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

        moves = () if alone else ((flat, send),)
        return Transfer(moves, lambda: bucket.views(flat), stage, apart=lambda: bucket.views(flat.clone()))

    def _gather(self, bucket: Bucket, transfer: Transfer, slot: SlotRange | None, after: list[Token]) -> Gathered:
        group = bucket.channels.gather

        def gather(async_op: bool) -> dist.Work | AllOf | None:
            assert group is not None
            works = [private.all_gather(to, part, group, async_op=async_op) for to, part in transfer.moves]
            return works[0] if len(works) == 1 else AllOf(works)

        waits = list(after)
        if self._start is not None:
            waits.append(self._start)
        if not self.arena.planned:
            waits.append(self._streams.mark())
        collective = gather if transfer.moves else None
        with self.frame.naming(Kind.UNSHARD, bucket) as watched:
            token = watched(
                self._streams.launch("gather", collective, before=transfer.stage, then=transfer.settle, after=waits)
            )
        return Gathered(transfer, slot, self.frame.launched(token))

    def unsharded(self, index: int) -> tuple[torch.Tensor, ...]:
        """Parameters for code outside programs, in memory of their own where they do not stay in memory anyway."""
        bucket = self.buckets[index]
        if bucket.full is not None:
            self.unshard(index, None)
            self.wait(index)
            return bucket.views(bucket.full)
        flat = torch.empty(bucket.plan.layout.numel, dtype=bucket.plan.param_dtype, device=bucket.device)
        self._gather(bucket, self._plain(bucket, flat), None, [self._streams.mark()]).token.wait()
        self._unseen.gathered(bucket)
        return bucket.views(flat)

    def reuses(self, indices: Iterable[int]) -> None:
        """Code outside programs goes on using what ``unsharded`` gave it: refuse where that is not current."""
        kept = (self.buckets[index] for index in indices if self.buckets[index].full is None)
        self._unseen.compare(kept, at_rest=False)
