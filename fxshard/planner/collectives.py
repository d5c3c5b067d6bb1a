"""The cost of collectives: α–β estimates, latency per step plus bytes over bandwidth.

``size`` is always that of the full buffer: what a gather makes, what a reduction starts from. ``n`` ranks lie on
``N`` nodes, ``g`` of them on each. With β the bandwidth per device in one direction:

    bytes       max( size · (n − 1)/n / β_intra ,  size · (N − 1)/N / (g · β_inter) )
    latency     ⌈log2 g⌉ · α_intra + min(N − 1, 4 · ⌈log2 N⌉) · α_inter

Every device receives all but its own part over its NVLink. A node receives all but its own part too, once, over the
cards of its ``g`` devices together: rings enter and leave a node over different cards, and pass data on inside. So it
is NVLink or the sum of a node's cards that bounds a collective, whichever is slower.

A ring of nodes takes ``N − 1`` steps; NCCL turns to trees and PAT where rings get long, so the steps stop growing
linearly. The cap of ``4 · ⌈log2 N⌉`` (from 17 nodes on) is a choice between both, not a measurement.
"""

from __future__ import annotations

from math import ceil, log2
from typing import TYPE_CHECKING

from fxshard.planner.hardware import Hardware

if TYPE_CHECKING:
    from fxshard.planner.bucket_plan import BucketPlan


def all_gather_seconds(size: float, ranks: int, hardware: Hardware, *, stride: int = 1) -> float:
    """Seconds to gather a buffer of ``size`` bytes from ``ranks`` shards. ``stride``: see :func:`_split`."""
    if ranks == 1:
        return 0.0
    nodes, per_node = _split(ranks, hardware, stride)
    inside = size * (ranks - 1) / ranks / hardware.intra_bandwidth if per_node > 1 else 0.0
    outside = size * (nodes - 1) / nodes / (per_node * hardware.inter_bandwidth)
    return max(inside, outside) + _latency(nodes, per_node, hardware)


def reduce_scatter_seconds(size: float, ranks: int, hardware: Hardware, *, stride: int = 1) -> float:
    """A gather backwards: the same bytes over the same links."""
    return all_gather_seconds(size, ranks, hardware, stride=stride)


def all_reduce_seconds(size: float, ranks: int, hardware: Hardware, *, stride: int = 1) -> float:
    """A reduce-scatter and an all-gather. Switches that add up on the way (NVLS) are faster; not counted on."""
    return 2 * all_gather_seconds(size, ranks, hardware, stride=stride)


def all_to_all_seconds(size: float, ranks: int, hardware: Hardware, *, stride: int = 1) -> float:
    """Each rank sends an equal part of its own buffer of ``size`` bytes to every rank.

    Nothing is shared on the way: what leaves the node goes over the device's own card,
    ``max( size · (g − 1)/n / β_intra , size · (n − g)/n / β_inter )``, and the network is entered once.
    """
    if ranks == 1:
        return 0.0
    nodes, per_node = _split(ranks, hardware, stride)
    inside = size * (per_node - 1) / ranks / hardware.intra_bandwidth
    outside = size * max(0, ranks - per_node) / ranks / hardware.inter_bandwidth
    latency = hardware.intra_latency if nodes == 1 else hardware.inter_latency
    return max(inside, outside) + latency


def _split(ranks: int, hardware: Hardware, stride: int) -> tuple[int, int]:
    """(nodes, ranks of the group on each) of a group whose neighbours are ``stride`` ranks apart."""
    per_node = min(ranks, max(1, hardware.ranks_per_node // stride))
    return ceil(ranks / per_node), per_node


def _latency(nodes: int, per_node: int, hardware: Hardware) -> float:
    inside = ceil(log2(per_node))
    outside = min(nodes - 1, 4 * ceil(log2(nodes)))
    return inside * hardware.intra_latency + outside * hardware.inter_latency


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

    Both directions of the link are in use at once, during the update. Muon's momentum is waited for, and only its way
    back is hidden. Within one memory nothing is.
    """
    if bucket.offload != "host":
        return own
    copied = hardware.host_seconds(bucket.moment_bytes)
    if not hardware.host_bandwidth:
        return own + 2 * copied
    return own + copied if bucket.matrices else max(own, copied)
