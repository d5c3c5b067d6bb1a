"""The scales of all weights in float8, made anew in one collective whenever masters changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.kernels.float8 import E4M3, Scaling, scales_of
from fxshard.planner.float8_copies import Float8Copies
from fxshard.runtime.bucket import Bucket
from fxshard.schedule.events import Phase


class WeightScales:
    """Largest magnitudes and scales in two flat tensors; buckets hold views of them."""

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        groups: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            if isinstance(bucket.copies, Float8Copies):
                groups.setdefault(id(bucket.channels), []).append(bucket)
        self._groups = list(groups.values())
        self._buckets = [bucket for group in self._groups for bucket in group]
        counts = [bucket.plan.scale_count for bucket in self._buckets]
        self._largest = torch.zeros(sum(counts), device=device)
        self._scales = torch.ones(sum(counts), device=device)
        places = zip(self._largest.split(counts), self._scales.split(counts), strict=True) if counts else ()
        for bucket, (largest, scales) in zip(self._buckets, places, strict=True):
            _copies(bucket).bind(largest, scales)
        self._versions: dict[int, int] = {}
        """Of the masters that the scales are of, by bucket."""
        self._owned: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._infinite: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def refresh(self, phase: Phase | None) -> None:
        """If a master changed: the largest magnitudes on all ranks, in one all-reduce, and scales from them.

        Ranks agree about what changed, so they all do it or none does.
        """
        versions = {bucket.plan.index: bucket.version for bucket in self._buckets}
        if versions == self._versions:
            return
        self._check()
        with torch.no_grad():
            self._measure()
            start = 0
            for group in self._groups:
                count = sum(bucket.plan.scale_count for bucket in group)
                part = self._largest[start : start + count]
                part.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # not every maximum of two knows NaN
                group[0].channels.all_reduce(part, dist.ReduceOp.MAX, f"{phase} {count} scales of weights")
                start += count
            # What is quantized is rounded to bf16 first, and the largest of what is rounded is the largest, rounded.
            self._scales.copy_(scales_of(self._largest.bfloat16(), E4M3))
        self._versions = versions
        self._note()

    def are_of(self, bucket: Bucket) -> bool:
        """Whether the scales are those of what a bucket's master holds now."""
        return self._versions.get(bucket.plan.index) == bucket.version

    def _measure(self) -> None:
        """The largest magnitudes of what this rank owns; those of others' rows are zero. Of matrices in one go."""
        self._largest.zero_()
        if _copies(self._buckets[0]).recipe.scaling is not Scaling.TENSOR:
            for bucket in self._buckets:
                _copies(bucket).measure(bucket.master)
            return
        if self._owned is None:
            owned: list[tuple[int, torch.Tensor]] = []
            start = 0
            for bucket in self._buckets:
                spans = bucket.plan.scale_spans
                owned += [(start + spans[i][0], rows) for i, _, rows in _copies(bucket).parts(bucket.master)]
                start += bucket.plan.scale_count
            places = torch.tensor([place for place, _ in owned], dtype=torch.int64, device=self._largest.device)
            self._owned = places, [rows for _, rows in owned]
        places, matrices = self._owned
        if matrices:
            norms = torch.stack(private.foreach_norm(matrices, torch.inf))
            self._largest.index_copy_(0, places, norms.float())

    def _note(self) -> None:
        """Have it known, without waiting for the device, whether something is not finite."""
        infinite = self._largest.isinf()
        if self._largest.device.type != "cuda":
            self._raise(infinite)
            return
        here = torch.empty(infinite.shape, dtype=torch.bool, pin_memory=True)
        here.copy_(infinite, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._infinite = here, arrived

    def _check(self) -> None:
        if self._infinite is not None:
            (here, arrived), self._infinite = self._infinite, None
            arrived.synchronize()  # a step ago
            self._raise(here)

    def _raise(self, infinite: torch.Tensor) -> None:
        if not infinite.any():
            return
        counts = [bucket.plan.scale_count for bucket in self._buckets]
        names = [
            bucket.plan.name for bucket, part in zip(self._buckets, infinite.split(counts), strict=True) if part.any()
        ]
        self._versions = {}
        raise StateError(
            f"weights of {', '.join(names[:4])}{' and others' if names[4:] else ''} are not finite: they have no scale "
            "in float8. An update before this step made them so: clip gradients, lower the learning rate, or go back "
            "to a checkpoint"
        )


def _copies(bucket: Bucket) -> Float8Copies:
    assert isinstance(bucket.copies, Float8Copies)
    return bucket.copies
