"""Full gradient buckets: where backward writes them, and how they become gradients of shards."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxshard._torch import private
from fxshard._torch.errors import PeerError
from fxshard.planner.memory import SlotRange
from fxshard.runtime.agreement import Agreement
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.frame import Frame
from fxshard.runtime.publishing import Publishing, Written
from fxshard.runtime.streams import Token
from fxshard.schedule.events import Kind

Needs = tuple[tuple[int, tuple[int, ...]], ...]
"""(position, what its gradient is computed from): the results of forward whose gradients it needs one of, by number."""


@dataclass
class Reducing:
    """A full gradient bucket that is filled, then reduced."""

    flat: torch.Tensor
    slot: SlotRange | None
    accumulate: bool
    written: Written
    """The parameters that get a gradient, here or in a micro-batch before."""
    absent: tuple[torch.Tensor, ...] = ()
    """What is computed from results of forward that no loss uses."""
    result: torch.Tensor | None = None
    """This rank's part of the sum, before it goes where gradients stay."""
    token: Token | None = None
    """The full bucket is reduced and free again."""
    settled: Token | None = None
    """The gradient is where it stays: the same, or after the sum over replicas."""


class Reductions:
    """Takes, reduces and settles gradient buckets. Called by programs only, in the order of the schedule."""

    def __init__(self, frame: Frame, agreement: Agreement | None) -> None:
        self._frame = frame
        self.publishing = Publishing(frame.buckets, agreement)
        self.without_loss: frozenset[int] = frozenset()
        """Of the backward that runs: gradients of forward's results that autograd does not have ."""
        self.synchronises = True
        """Whether backward reduces gradients; inside ``no_sync`` it keeps them. Ranks choose alike."""
        self.stores = True
        """Whether a backward is for parameters: not one that ``torch.autograd.grad`` asks for gradients of inputs,
        which leaves theirs as they are. Ranks ask alike."""
        self._averages = frame.device.type == "cuda"
        self._reducing: dict[int, Reducing] = {}
        self._unsettled: list[Reducing] = []

    @property
    def alive(self) -> int:
        """Full gradient buckets that are being filled or reduced."""
        return len(self._reducing)

    def end(self) -> None:
        """A program is over: what it reduced is there for what runs next."""
        for state in self._unsettled:
            assert state.settled is not None
            state.settled.wait()
        self._unsettled.clear()

    def abort(self) -> None:
        """A program failed half-way: let what it started end and forget it."""
        self.publishing.due.clear()
        for state in [*self._reducing.values(), *self._unsettled]:
            for token in (state.token, state.settled):
                if token is not None:
                    # The failure that is being raised may be this very collective.
                    with contextlib.suppress(RuntimeError, PeerError):
                        token.wait()
            if state.slot is not None:
                self._frame.arena.release(state.slot, self._frame.streams.mark())
        self._reducing.clear()
        self._unsettled.clear()

    def forget(self) -> None:
        """What was started will never run: there is nothing to wait for."""
        self.publishing.due.clear()
        self._reducing.clear()
        self._unsettled.clear()

    def add_gradient(self, index: int, position: int, gradient: torch.Tensor) -> None:
        """A gradient that autograd accumulated outside programs: averaged over the ranks, added to the shard's."""
        bucket = self._frame.buckets[index]
        with torch.no_grad():
            value = gradient.to(bucket.plan.reduce_dtype).contiguous()
            event = f"eager reduce of {bucket.plan.params[position]!r}"
            bucket.channels.all_reduce(value, dist.ReduceOp.SUM, event)
            value = value / bucket.plan.domain.divisor
            bucket.add_gradient(bucket.plan.params[position], value)
        self.publishing.call_hooks(index, [position])

    def grad(
        self, index: int, slot: SlotRange | None, zeros: tuple[int, ...] = (), needs: Needs = ()
    ) -> tuple[torch.Tensor, ...]:
        """Take a gradient bucket. Nothing will be written for ``zeros``; for what is in ``needs``, nothing that counts
        if all it is computed from is missing.
        """
        bucket = self._frame.buckets[index]
        accumulate = not self._keeps(bucket) and bucket.prepare_accumulation()
        flat = self._gradient_target(bucket, slot, accumulate)
        views = (
            self._frame.arena.views(("gradient", index, slot), lambda: bucket.views(flat))
            if slot
            else bucket.views(flat)
        )
        absent = [position for position, sources in needs if self.without_loss.issuperset(sources)]
        written = frozenset(range(len(views))).difference(zeros, absent)
        self._reducing[index] = Reducing(flat, slot, accumulate, written, tuple(views[i] for i in absent))
        for start, numel in bucket.gaps:
            flat[start : start + numel].zero_()
        for i in zeros:
            views[i].zero_()
        return views

    def reduce(self, index: int) -> None:
        bucket, state = self._frame.buckets[index], self._reducing[index]
        self._clear_absent(state)
        self._add_kept(bucket, state)
        flat, target, group = state.flat, bucket.hold_gradient(), bucket.reducing
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
            return private.reduce_scatter(state.result, flat, operation, group, async_op=async_op)

        with self._frame.naming(Kind.REDUCE, bucket) as watched:
            state.token = watched(
                self._frame.streams.launch(
                    "reduce",
                    combine if group is not None else None,
                    before=prepare,
                    then=None if bucket.plan.adds_replicas else lambda: self._settle(bucket, state),
                    after=[self._frame.streams.mark()],
                )
            )
        if not bucket.plan.adds_replicas:
            state.settled = state.token
        self._frame.launched(state.token)

    def accumulate(self, index: int) -> None:
        """In place of ``reduce`` inside ``no_sync``: full gradients stay here until a backward reduces them."""
        bucket, state = self._frame.buckets[index], self._reducing[index]
        if not self._keeps(bucket):
            self.reduce(index)
            return
        self._clear_absent(state)
        bucket.kept_for |= state.written
        if bucket.kept is not None:
            bucket.kept.add_(state.flat)
        else:
            bucket.kept = state.flat.clone() if bucket.plan.grad_in_arena else state.flat

    def _clear_absent(self, state: Reducing) -> None:
        """Autograd gives zeros for a result that no loss uses; times infinity they would be no zeros."""
        for view in state.absent:
            view.zero_()
        state.absent = ()

    def put_back(self, index: int) -> None:
        """In place of ``finish`` inside ``no_sync``: the place in the arena is free again."""
        if not self._keeps(self._frame.buckets[index]):
            self.finish(index)
            return
        self._release(index)

    def discard(self, index: int) -> None:
        """In place of ``reduce`` and ``finish`` where gradients of parameters are not asked for."""
        self._release(index)
        self._frame.buckets[index].discarded = True

    def _release(self, index: int) -> None:
        state = self._reducing.pop(index)
        if state.slot is not None:
            self._frame.arena.release(state.slot, self._frame.streams.mark())

    def _keeps(self, bucket: Bucket) -> bool:
        """Whether full gradients are kept: not where no other rank has any part in them."""
        return not self.synchronises and bucket.reducing is not None

    def _add_kept(self, bucket: Bucket, state: Reducing) -> None:
        """Reduce what micro-batches before this one left, along with its own."""
        if bucket.kept is None:
            return
        if bucket.plan.grad_in_arena:
            state.flat.add_(bucket.kept)
        else:
            state.flat = bucket.kept.add_(state.flat)
        state.written |= bucket.kept_for
        bucket.kept, bucket.kept_for = None, frozenset()

    def all_reduce(self, index: int) -> None:
        """The reduced shard is added up over its replicas, on a stream and in a group of its own."""
        bucket, state = self._frame.buckets[index], self._reducing[index]
        assert state.token is not None, f"{bucket.plan.name} is added up before it is reduced"
        group, operation = bucket.channels.replicas, self._operation(bucket)

        def combine(async_op: bool) -> dist.Work | None:
            assert group is not None and state.result is not None
            return dist.all_reduce(state.result, op=operation, group=group, async_op=async_op)

        with self._frame.naming(Kind.ALL_REDUCE, bucket) as watched:
            state.settled = watched(
                self._frame.streams.launch(
                    "replicas", combine, then=lambda: self._settle(bucket, state), after=[state.token]
                )
            )
        self._frame.launched(state.settled)

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
        bucket, state = self._frame.buckets[index], self._reducing.pop(index)
        assert state.token is not None, f"{bucket.plan.name} is finished before it is reduced"
        assert state.settled is not None, f"{bucket.plan.name} is finished before replicas are added up"
        # Kept until the end: scratch memory belongs to the compute stream and the reduction may still read it.
        self._unsettled.append(state)
        if state.slot is not None:
            self._frame.arena.release(state.slot, state.token)
        if not self._frame.arena.planned:
            state.settled.wait()  # the memory goes back to an allocator that knows this stream only
        self.publishing.due[index] = state.written

    def _gradient_target(self, bucket: Bucket, slot: SlotRange | None, accumulate: bool) -> torch.Tensor:
        """Where backward writes full gradients: the arena, the place they stay, or scratch."""
        plan = bucket.plan
        if plan.grad_in_arena:
            assert slot is not None, f"no arena slot is planned for the gradients of {plan.name}"
            memory, pending = self._frame.arena.take(slot)
            for token in pending:
                token.wait()
            return memory.view(plan.reduce_dtype)
        if bucket.kept is None:
            if bucket.grad_full is not None:
                return bucket.grad_full
            if not accumulate and plan.reduce_dtype == plan.master_dtype and not self._keeps(bucket):
                return bucket.hold_gradient()
        return torch.empty(plan.layout.numel, dtype=plan.reduce_dtype, device=bucket.device)
