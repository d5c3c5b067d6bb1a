"""A summary of a graph's compute, which the verifier compares with the events that are recorded from the graph."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from fxshard._torch import private
from fxshard.kernels.float8_ops import float8_mm_into
from fxshard.kernels.mxfp8_ops import mxfp8_mm_into
from fxshard.kernels.ops import mm_into, scaled_into
from fxshard.schedule.aliases import readers, root_of
from fxshard.schedule.collectives import ModelCollective, described
from fxshard.schedule.events import Event, Kind, Phase, event_of, events
from fxshard.schedule.offloads import HostCopy
from fxshard.schedule.offloads import described as host_copies
from fxshard.schedule.params import param_inputs

WRITES = (torch.ops.aten.copy_.default, mm_into, mxfp8_mm_into, float8_mm_into, scaled_into)
"""Operators that write gradients into their bucket."""


@dataclass(frozen=True)
class ParamInput:
    """A parameter that a graph was traced with."""

    bucket: int
    position: int
    """In the bucket's layout."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class BucketUse:
    """The computing nodes of a graph, counted from 0, that read a bucket's parameters or write its gradients."""

    bucket: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class GraphSummary:
    """The compute of one graph by bucket, found from its buckets' views, not from stretches between events."""

    phase: Phase
    nodes: int
    """Nodes that compute: neither runtime events nor the views that these give."""
    reads: tuple[BucketUse, ...]
    writes: tuple[BucketUse, ...]
    inputs: tuple[ParamInput, ...] = ()
    collectives: tuple[ModelCollective, ...] = ()
    """Those of the model's own, in the order in which it makes them."""
    copies: tuple[HostCopy, ...] = ()
    """Activations that go to the host in forward, and come back in backward, by their number."""


def summary(graph: fx.Graph, phase: Phase) -> GraphSummary:
    number = {node: i for i, node in enumerate(filter(computes, graph.nodes))}
    reads: dict[int, set[int]] = {}
    writes: dict[int, set[int]] = {}
    for source, event in events(graph):
        if event.bucket_index < 0:
            continue
        for reader in readers(source.users):
            if reader in number:
                written = event.kind is Kind.GRAD and reader.target in WRITES
                (writes if written else reads).setdefault(event.bucket_index, set()).add(number[reader])
    inputs = [
        ParamInput(ref.bucket, ref.position, tuple(map(private.size_hint, node.meta["val"].shape)))
        for node, ref in param_inputs(graph).items()
        if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    collectives = tuple(described(graph, number, bucket_viewed_by))
    copies = host_copies(graph, number)
    return GraphSummary(phase, len(number), _uses(reads), _uses(writes), tuple(inputs), collectives, copies)


def bucket_viewed_by(node: fx.Node) -> Event | None:
    """The wait or grad event whose memory a node is a view of."""
    node = root_of(node)
    if unpacks(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return event_of(source)
    return None


def _uses(found: dict[int, set[int]]) -> tuple[BucketUse, ...]:
    return tuple(BucketUse(bucket, tuple(sorted(found[bucket]))) for bucket in sorted(found))


def computes(node: fx.Node) -> bool:
    """Whether a node is part of a stretch of compute."""
    return node.op == "call_function" and event_of(node) is None and not unpacks(node)


def unpacks(node: fx.Node) -> bool:
    """Whether a node takes one view out of those that a runtime node gives."""
    source = node.args[0] if node.op == "call_function" and node.target is operator.getitem else None
    return isinstance(source, fx.Node) and event_of(source) is not None
