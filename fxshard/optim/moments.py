"""The optimizer state of one bucket, in flat tensors on the rank of its shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from fxshard._torch.errors import StateError
from fxshard.optim.sending import sent
from fxshard.plan.layout import Fragment, aligned
from fxshard.plan.shares import shares, within
from fxshard.runtime.bucket import Bucket


class Moments:
    """State tensors of a bucket, and a step count per parameter.

    ``first`` is as long as the shard: AdamW's first moment, and the momentum of what Muon updates. ``second`` is
    AdamW's alone, so it has room for AdamW's parameters only. The counts exist twice: as numbers, to find neighbours
    that can be updated together without asking the device, and as a tensor, which is what the kernel reads.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.muon = frozenset(bucket.plan.matrices)
        layout, length = bucket.plan.layout, bucket.plan.second_moment_numel(bucket.rank)
        self.shares = [(0, layout.shard_numel)]
        """The stretch of the shard that each of its replicas updates."""
        self.begin, self.fragments = 0, bucket.fragments
        if bucket.plan.shares_state:
            self.shares = shares(layout, bucket.rank, bucket.plan.domain.replicas)
            self.begin, end = self.shares[bucket.channels.replica]
            self.fragments = tuple(within(layout, fragment, self.begin, end) for fragment in bucket.fragments)
            length = end - self.begin
            self.first = bucket.master.new_zeros(length)
        else:
            self.first = torch.zeros_like(bucket.master)
        self.second = torch.zeros(length, dtype=bucket.master.dtype, device=bucket.device)
        self.counts = [0] * len(bucket.params)
        self.steps = torch.zeros(len(bucket.params), dtype=torch.float32, device=bucket.device)
        self._second_at = self._places()
        self._counted: list[int] = []
        self._ones = torch.zeros_like(self.steps)

    def _places(self) -> list[int]:
        """Where each parameter's second moment starts."""
        if not self.muon:
            return [fragment.offset - self.begin for fragment in self.fragments]
        places, cursor = [], 0
        for fragment in self.fragments:
            places.append(cursor)
            cursor += aligned(fragment.numel) if fragment.name not in self.muon else 0
        return places

    # -- AdamW -------------------------------------------------------------------------------------------------------

    def count_step(self, allowed: torch.Tensor | None = None) -> None:
        """One more step for every parameter of AdamW's that has a gradient.

        With ``allowed``, one or zero on the device, the tensor counts only what is allowed, and the numbers assume that
        it is, until ``take_back``.
        """
        params, names = self.bucket.params, self.bucket.plan.params
        with_grad = [i for i, p in enumerate(params) if p.grad is not None and names[i] not in self.muon]
        for i in with_grad:
            self.counts[i] += 1
        if with_grad != self._counted:
            # Kept from step to step: to index with a list would copy it every time, and the host would wait for that.
            ones = [float(i in with_grad) for i in range(len(params))]
            self._counted, self._ones = with_grad, sent(ones, torch.float32, self.steps.device)
        if not with_grad:
            return
        if allowed is None:
            self.steps.add_(self._ones)
        else:
            self.steps.addcmul_(self._ones, allowed)

    def take_back(self) -> None:
        """The last step turned out not to be allowed."""
        for i in self._counted:
            self.counts[i] -= 1

    def stretches(self, group_of: Mapping[str, int]) -> Iterator[tuple[int, list[int]]]:
        """(group, positions) of local neighbours that one call can update: same group, same step, with gradients."""
        current: list[int] = []
        previous: tuple[int, int, int] | None = None
        for i, (fragment, parameter) in enumerate(zip(self.fragments, self.bucket.params, strict=True)):
            if not fragment.numel:
                continue
            adamw = parameter.grad is not None and fragment.name not in self.muon
            # Neighbours in the shard must be equally far apart in the second moment.
            kind = (group_of[fragment.name], self.counts[i], fragment.offset - self._second_at[i]) if adamw else None
            if current and kind != previous:
                assert previous is not None
                yield previous[0], current
                current = []
            if kind is not None:
                current.append(i)
            previous = kind
        if current and previous is not None:
            yield previous[0], current

    def tensors(self, positions: list[int]) -> tuple[torch.Tensor, ...]:
        """(master, gradient, moments, step) of one stretch."""
        bucket = self.bucket
        assert bucket.grad is not None
        begin, last = self.fragments[positions[0]], self.fragments[positions[-1]]
        where = slice(begin.offset, last.offset + last.numel)
        moments = slice(where.start - self.begin, where.stop - self.begin)
        at = self._second_at[positions[0]]
        return (
            bucket.master[where],
            bucket.grad[where],
            self.first[moments],
            self.second[at : at + last.offset + last.numel - begin.offset],
            self.steps[positions[0]],
        )

    # -- state dicts -------------------------------------------------------------------------------------------------

    def state_of(self, i: int) -> dict[str, torch.Tensor]:
        """What ``optimizer.state`` holds for a parameter: views of the flat tensors."""
        bucket, name = self.bucket, self.bucket.plan.params[i]
        fragment, at = self.fragments[i], self._second_at[i]
        first = bucket.as_state(self._first_of(fragment), name, fragment=fragment)
        if name in self.muon:
            return {"momentum_buffer": first}
        return {
            "step": self.steps[i],
            "exp_avg": first,
            "exp_avg_sq": bucket.as_state(self.second[at : at + fragment.numel], name, fragment=fragment),
        }

    def _first_of(self, fragment: Fragment) -> torch.Tensor:
        at = fragment.offset - self.begin
        return self.first[at : at + fragment.numel]

    def recount(self) -> None:
        """Take the step counts over from the tensor."""
        self.counts = [int(step) for step in self.steps.tolist()]

    def clear(self, i: int) -> None:
        """As if a parameter had never been stepped."""
        fragment, at = self.fragments[i], self._second_at[i]
        self._first_of(fragment).zero_()
        if fragment.name not in self.muon:
            self.second[at : at + fragment.numel].zero_()
        self.counts[i] = 0
        self.steps[i] = 0.0

    def load(self, i: int, state: Mapping[str, Any]) -> None:
        """Copy loaded state of a parameter into the flat tensors."""
        fragment = self.fragments[i]
        first = self._first_of(fragment)
        if fragment.name in self.muon:
            first.copy_(self._own_rows(state["momentum_buffer"], fragment))
            return
        first.copy_(self._own_rows(state["exp_avg"], fragment))
        at = self._second_at[i]
        self.second[at : at + fragment.numel].copy_(self._own_rows(state["exp_avg_sq"], fragment))
        self.counts[i] = int(state["step"])
        self.steps[i] = float(self.counts[i])

    def _own_rows(self, tensor: torch.Tensor, fragment: Fragment) -> torch.Tensor:
        """This rank's elements of sharded or of whole state, flat."""
        if isinstance(tensor, dist.tensor.DTensor):
            local = tensor.to_local()
            if local.numel() != fragment.numel:
                raise StateError(
                    f"the state of {fragment.name} is sharded in another way than the parameter: fxshard.save and "
                    "fxshard.load move state between layouts and numbers of ranks"
                )
            return local.reshape(-1)
        part = self.bucket.part(fragment.name, tensor)
        return (part[fragment.row_start : fragment.row_stop] if part.ndim else part).reshape(-1)
