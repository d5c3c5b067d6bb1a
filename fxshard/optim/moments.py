"""The optimizer state of one bucket, in flat tensors on the rank of its shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fxshard.optim.counts import StepCounts, own_rows
from fxshard.plan.layout import Fragment, aligned
from fxshard.plan.state import ROW_MOMENTS, second_moment_numel, second_numel
from fxshard.runtime.bucket import Bucket


class Moments(StepCounts):
    """State tensors of a bucket, as its master is.

    ``first`` is as long as the shard: AdamW's first moment, and the momentum of what Muon updates. ``second`` has room
    for the second moments of AdamW's parameters, and under NorMuon for one of each row of Muon's.
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        length = second_moment_numel(bucket.plan, bucket.rank)
        if bucket.plan.shares_state:
            length = self.end - self.begin
            self.first = bucket.master.new_zeros(length)
            if self.muon:
                length = sum(aligned(second_numel(bucket.plan, fragment)) for fragment in self.fragments)
        else:
            self.first = torch.zeros_like(bucket.master)
        self.second = torch.zeros(length, dtype=bucket.master.dtype, device=bucket.device)
        self._second_at = self._places()

    def _places(self) -> list[int]:
        """Where each parameter's second moment starts."""
        if not self.muon:
            return [fragment.offset - self.begin for fragment in self.fragments]
        places, cursor = [], 0
        for fragment in self.fragments:
            places.append(cursor)
            cursor += aligned(second_numel(self.bucket.plan, fragment))
        return places

    # -- AdamW -------------------------------------------------------------------------------------------------------

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
        fragment = self.fragments[i]
        first = bucket.as_state(self._first_of(fragment), name, fragment=fragment)
        if name in self.muon:
            found = {"momentum_buffer": first}
            if bucket.plan.row_moments:
                of_rows = self._second_of(i)
                found[ROW_MOMENTS] = bucket.as_state(of_rows, name, fragment=fragment, field=ROW_MOMENTS)
            return found
        second = bucket.as_state(self._second_of(i), name, fragment=fragment)
        return {"step": self.steps[i], "exp_avg": first, "exp_avg_sq": second}

    def row_moments(self, name: str) -> torch.Tensor:
        """The second moments of this rank's rows of a matrix, as [..., rows, 1]."""
        i = self.bucket.plan.layout.index[name]
        return self.bucket.shaped(self._second_of(i), name, self.fragments[i], ROW_MOMENTS)

    def momentum(self, name: str) -> torch.Tensor:
        """The momentum of the rows of a matrix that this rank updates."""
        fragment = self.fragments[self.bucket.plan.layout.index[name]]
        return self.bucket.shaped(self._first_of(fragment), name, fragment)

    def _second_of(self, i: int) -> torch.Tensor:
        at = self._second_at[i]
        return self.second[at : at + second_numel(self.bucket.plan, self.fragments[i])]

    def _first_of(self, fragment: Fragment) -> torch.Tensor:
        at = fragment.offset - self.begin
        return self.first[at : at + fragment.numel]

    def clear(self, i: int) -> None:
        """As if a parameter had never been stepped."""
        self._first_of(self.fragments[i]).zero_()
        self._second_of(i).zero_()
        self.set_count(i, 0)

    def load(self, i: int, state: Mapping[str, Any]) -> None:
        """Copy loaded state of a parameter into the flat tensors."""
        fragment = self.fragments[i]
        first = self._first_of(fragment)
        if fragment.name in self.muon:
            first.copy_(own_rows(self.bucket, state["momentum_buffer"], fragment))
            if self.bucket.plan.row_moments:
                second = self._second_of(i)
                second.copy_(own_rows(self.bucket, state[ROW_MOMENTS], fragment, second.numel()))
            return
        first.copy_(own_rows(self.bucket, state["exp_avg"], fragment))
        self._second_of(i).copy_(own_rows(self.bucket, state["exp_avg_sq"], fragment))
        self.set_count(i, int(state["step"]))
