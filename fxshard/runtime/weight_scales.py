"""The scales of all weights in float8, made anew in one collective whenever masters changed.

With a scale per tensor, an optimizer's update leaves the largest magnitudes of what it wrote. They are used as long as
the counter of changes says that nothing was written since; otherwise masters are read once more. What no counter sees
(``unseen``) shows when the masters are quantized: what is read then has another largest magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.kernels.float8 import E4M3, Scaling, scales_of
from fxshard.plan.float8_copies import Float8Copies
from fxshard.runtime.bucket import Bucket
from fxshard.schedule.events import Phase

NOTHING = -1.0
"""In place of a largest magnitude: nothing was read."""


class WeightScales:
    """Largest magnitudes and scales in two flat tensors; buckets hold views of them.

    Buckets that share a process group lie together, and behind them a number that says whether something is wrong.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        groups: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            if isinstance(bucket.copies, Float8Copies):
                groups.setdefault(id(bucket.channels), []).append(bucket)
        self._groups = list(groups.values())
        self._buckets = [bucket for group in self._groups for bucket in group]
        self._places: dict[int, slice] = {}
        """Of each bucket's scales among all."""
        self._parts: list[slice] = []
        """Of each group, with the number behind them."""
        end = 0
        for group in self._groups:
            begin = end
            for bucket in group:
                self._places[bucket.plan.index] = slice(end, end + _copies(bucket).scale_count)
                end += _copies(bucket).scale_count
            end += 1
            self._parts.append(slice(begin, end))
        self._largest = torch.zeros(end, device=device)
        self._own = torch.zeros(end, device=device)
        """The largest magnitudes of this rank's rows."""
        self._seen = torch.full((end,), NOTHING, device=device)
        """Those of what was quantized last."""
        self._scales = torch.ones(end, device=device)
        for bucket in self._buckets:
            place = self._places[bucket.plan.index]
            _copies(bucket).bind(self._largest[place], self._scales[place], self._seen[place])
        self._versions: dict[int, int] = {}
        """Of the masters that the scales are of, by bucket."""
        self._updated: dict[int, int] = {}
        """Of the masters whose largest magnitudes the last update left, by bucket."""
        self.measured = 0
        """How often the masters of a bucket were read to find them."""
        self._owned: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._noted: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def refresh(self, phase: Phase | None) -> None:
        """If a master changed: the largest magnitudes on all ranks, in one all-reduce, and scales from them.

        Ranks agree about what changed, so they all do it or none does.
        """
        versions = {bucket.plan.index: bucket.version for bucket in self._buckets}
        if versions == self._versions:
            return
        self._check()
        with torch.no_grad():
            changed = (self._seen != NOTHING) & (self._seen != self._own)
            self._measure()
            self._own.copy_(self._largest)
            self._seen.fill_(NOTHING)
            for group, place in zip(self._groups, self._parts, strict=True):
                part = self._largest[place]
                part[-1] = changed[place].any()
                part.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # not every maximum of two knows NaN
                what = f"{phase} scales of {len(part) - 1} groups of weights"
                group[0].channels.all_reduce(part, dist.ReduceOp.MAX, what)
            # What is quantized is rounded to bf16 first, and the largest of what is rounded is the largest, rounded.
            self._scales.copy_(scales_of(self._largest.bfloat16(), E4M3))
        self._versions = versions
        self._note(changed)

    def take_over(self, bucket: Bucket) -> None:
        """A bucket has the values of an update, which may have left their largest magnitudes."""
        if _copies(bucket).knows_update:
            self._updated[bucket.plan.index] = bucket.version
        else:
            self._updated.pop(bucket.plan.index, None)

    def are_of(self, bucket: Bucket) -> bool:
        """Whether the scales are those of what a bucket's master holds now."""
        return self._versions.get(bucket.plan.index) == bucket.version

    def _measure(self) -> None:
        """The largest magnitudes of what this rank owns; those of others' rows are zero. Of matrices in one go."""
        self._largest.zero_()
        if _copies(self._buckets[0]).recipe.scaling is not Scaling.TENSOR:
            for bucket in self._buckets:
                _copies(bucket).measure(bucket.master)
            self.measured += len(self._buckets)
            return
        known = [bucket for bucket in self._buckets if self._updated.get(bucket.plan.index) == bucket.version]
        private.foreach_copy_([_copies(b).largest for b in known], [_copies(b).updated for b in known])
        owned = [self._owned_by(bucket) for bucket in self._buckets if bucket not in known]
        self.measured += len(owned)
        matrices = [rows for _, found in owned for rows in found]
        if matrices:
            norms = torch.stack(private.foreach_norm(matrices, torch.inf))
            self._largest.index_copy_(0, torch.cat([places for places, _ in owned]), norms.float())

    def _owned_by(self, bucket: Bucket) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Of a bucket's weights that this rank has rows of: their places among all, and the rows. Made once."""
        index = bucket.plan.index
        if index not in self._owned:
            start, parts = self._places[index].start, _copies(bucket).parts(bucket.master)
            places = torch.tensor([start + i for i, _, _ in parts], dtype=torch.int64, device=self._largest.device)
            self._owned[index] = places, [rows for _, _, rows in parts]
        return self._owned[index]

    def _note(self, changed: torch.Tensor) -> None:
        """Have it known, without waiting for the device, what is not finite and what changed unseen."""
        wrong = torch.stack([self._largest.isinf(), changed, self._largest == 1])
        if self._largest.device.type != "cuda":
            self._raise(wrong)
            return
        here = torch.empty(wrong.shape, dtype=torch.bool, pin_memory=True)
        here.copy_(wrong, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._noted = here, arrived

    def _check(self) -> None:
        if self._noted is not None:
            (here, arrived), self._noted = self._noted, None
            arrived.synchronize()  # a step ago
            self._raise(here)

    def _raise(self, wrong: torch.Tensor) -> None:
        infinite, changed = (
            [bucket.plan.name for bucket in self._buckets if flags[self._places[bucket.plan.index]].any()]
            for flags in wrong[:2]
        )
        if infinite:
            self._versions = {}
            raise StateError(
                f"weights of {_some(infinite)} are not finite: they have no scale in float8. An update before this "
                "step made them so: clip gradients, lower the learning rate, or go back to a checkpoint"
            )
        if any(wrong[2][place.stop - 1] for place in self._parts):
            self._versions = {}
            raise StateError(
                f"weights of {_some(changed) or 'other ranks'} were changed after an optimizer step in a way that "
                "leaves no trace (through .data, torch._foreach functions or a kernel of your own), so that their "
                "scales in float8 were those of other values: change the parameters themselves under torch.no_grad(), "
                "or call model.parameters_changed() after the change, on every rank"
            )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:4])}{' and others' if names[4:] else ''}"


def _copies(bucket: Bucket) -> Float8Copies:
    assert isinstance(bucket.copies, Float8Copies)
    return bucket.copies
