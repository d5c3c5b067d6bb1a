"""The ways in which a planner may keep optimizer state: what each takes of the device, and how long updates take.

Buckets go to the host one after another, those with the least moments first, so that little more is moved than has to
be; in which order does not depend on a budget. The format is that of all buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.collectives import update_seconds
from fxshard.planner.hardware import Hardware
from fxshard.planner.state import AUTO, FORMATS, StateChoice, update_traffic


@dataclass(frozen=True)
class KeptState:
    """One way to keep it."""

    buckets: tuple[BucketPlan, ...]
    seconds: float = 0.0
    """How much longer updates take than with all moments on the device."""

    @cached_property
    def trained(self) -> tuple[BucketPlan, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.trainable)

    @cached_property
    def format(self) -> str:
        """The narrowest: buckets whose masters are not fp32 keep what they have."""
        return max((bucket.state for bucket in self.trained), key=FORMATS.index, default=FORMATS[0])

    @cached_property
    def on_host(self) -> int:
        """How many buckets have their moments there."""
        return sum(bucket.offload == "host" for bucket in self.trained)

    @cached_property
    def host_bytes(self) -> int:
        return sum(bucket.moment_bytes for bucket in self.trained if bucket.offload == "host")

    @cached_property
    def device_bytes(self) -> int:
        """Bytes of moments on the device between steps."""
        return sum(bucket.moment_bytes for bucket in self.trained if bucket.offload != "host")

    @cached_property
    def staging_bytes(self) -> int:
        """Bytes that updates hold on the device in addition, one after another."""
        return max((bucket.staging_bytes for bucket in self.trained), default=0)

    @cached_property
    def key(self) -> tuple[tuple[str, str], ...]:
        """Format and place of every bucket."""
        return tuple((bucket.state, bucket.offload) for bucket in self.buckets)

    def __str__(self) -> str:
        if not self.on_host:
            return f"{self.format} on the device"
        every = len(self.trained)
        where = "the host" if self.on_host == every else f"the host for {self.on_host} of {every} buckets"
        return f"{self.format} on {where}"


def kept_state(buckets: Sequence[BucketPlan], hardware: Hardware) -> KeptState:
    """How buckets keep their state."""
    longer = sum(_longer(bucket, hardware) for bucket in buckets if bucket.trainable)
    return KeptState(tuple(buckets), longer)


def ways_to_keep(buckets: Sequence[BucketPlan], asked: StateChoice, hardware: Hardware) -> tuple[KeptState, ...]:
    """The ways that are allowed, the fastest first; of equally fast ones, fp32 before fewer bits.

    On a machine whose memory is the host's, nothing is moved there. Moments of masters in another dtype than fp32 stay
    on the device, in the dtype of the masters.
    """
    found = list(_ways(buckets, asked, hardware))
    if asked.most_bytes is not None:
        smallest = min(each.device_bytes for each in found)
        found = [each for each in found if each.device_bytes <= max(asked.most_bytes, smallest)]
    return tuple(sorted(found, key=lambda each: (each.seconds, FORMATS.index(each.format), each.on_host)))


def _ways(buckets: Sequence[BucketPlan], asked: StateChoice, hardware: Hardware) -> Iterator[KeptState]:
    packable = [bucket.index for bucket in buckets if bucket.trainable and bucket.master_dtype == torch.float32]
    for state in FORMATS if asked.format == AUTO and packable else (asked.first.format,):
        formatted = list(buckets)
        for index in packable:
            formatted[index] = replace(buckets[index], state=state, offload=asked.first.offload)
        yield kept_state(formatted, hardware)
        if asked.offload != AUTO or not hardware.host_bandwidth:
            continue
        longer = 0.0
        for index in sorted(packable, key=lambda index: (formatted[index].moment_bytes, index)):
            formatted[index] = replace(formatted[index], offload="host")
            longer += _longer(formatted[index], hardware)
            yield KeptState(tuple(formatted), longer)


def _longer(bucket: BucketPlan, hardware: Hardware) -> float:
    own = hardware.compute_seconds(0, update_traffic(bucket), torch.bfloat16)
    return update_seconds(bucket, own, hardware) - own
