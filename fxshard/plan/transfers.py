"""What the collectives of a bucket cost, and which links they take: those inside a node, or those between nodes; and
what an update costs whose moments come from the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxshard.plan.collectives import all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from fxshard.plan.hardware import Hardware

if TYPE_CHECKING:
    from fxshard.plan.buckets import BucketPlan

INSIDE, BETWEEN = "inside nodes", "between nodes"


def gather_seconds(bucket: BucketPlan, size: int, hardware: Hardware) -> float:
    """``size``: bytes of the whole bucket, here and below."""
    return all_gather_seconds(size, bucket.layout.ranks, hardware, stride=bucket.domain.stride)


def reduce_seconds(bucket: BucketPlan, size: int, hardware: Hardware) -> float:
    """Full gradients to shards; where there is one shard, an all-reduce over all ranks."""
    cost = reduce_scatter_seconds if bucket.layout.ranks > 1 else all_reduce_seconds
    return cost(size, bucket.reducing_ranks, hardware, stride=bucket.domain.stride)


def replicas_seconds(bucket: BucketPlan, size: int, hardware: Hardware) -> float:
    """The sum of a shard over its replicas, which are as far apart as the shards of one replica reach."""
    domain = bucket.domain
    return all_reduce_seconds(
        size / bucket.layout.ranks, domain.replicas, hardware, stride=domain.stride * domain.shards
    )


def link(bucket: BucketPlan, hardware: Hardware, *, replicas: bool = False) -> str:
    """The links that bound a collective: with a replica per node, shards and replicas use different ones."""
    ranks = bucket.domain.replicas if replicas else bucket.reducing_ranks
    stride = bucket.domain.stride * (bucket.domain.shards if replicas else 1)
    return INSIDE if ranks * stride <= hardware.ranks_per_node else BETWEEN


def update_seconds(bucket: BucketPlan, own: float, hardware: Hardware) -> float:
    """An update that takes ``own`` seconds by itself, with the copies of moments that rest on the host.

    Both directions of the link are in use at once, beside the update. Muon's momentum is waited for, and only its way
    back is hidden. Within one memory nothing is.
    """
    if bucket.offload != "host":
        return own
    copied = hardware.host_seconds(bucket.moment_bytes)
    if not hardware.host_bandwidth:
        return own + 2 * copied
    return own + copied if bucket.matrices else max(own, copied)
