"""The vocabulary of a schedule: runtime ops as they stand in a graph, and the record each of them carries.

The functions here are what a graph calls *before* it is bound to a runtime. They have names and signatures, so that
``print(graph)`` reads well, but no behaviour: planning never executes. ``runtime/program.py`` binds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NoReturn

import torch
from torch import fx

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.gather_modes import Copies
from fxshard.planner.memory import SlotRange

META = "fxshard"
"""Key of ``node.meta`` under which a runtime node carries its :class:`Event`."""


class Kind(StrEnum):
    """What an event does. ``COMPUTE``, ``UPDATE``, ``EXCHANGE``, ``ACCUMULATE`` and ``SCALES`` are no runtime nodes.

    ``ACCUMULATE`` is what a program does in place of ``REDUCE`` inside ``no_sync``. ``SCALES`` is what a program begins
    with where weights are float8 and changed: scales from the largest magnitudes on all ranks. ``COLLECTIVE`` is one
    that the model makes itself (tensor, expert or context parallel), ``AWAIT`` where its result is first read.
    ``OFFLOAD`` copies an activation to the host, ``RELEASE`` gives its memory back once it is there; ``RELOAD`` copies
    it back, ``RESTORE`` is where that must be over.
    """

    COMPUTE = "compute"
    UPDATE = "update"
    EXCHANGE = "exchange"
    UNSHARD = "unshard"
    WAIT = "wait"
    RESHARD = "reshard"
    GRAD = "grad"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"
    ACCUMULATE = "accumulate"
    FINISH = "finish"
    SCALES = "scales"
    COLLECTIVE = "collective"
    AWAIT = "await"
    OFFLOAD = "offload"
    RELEASE = "release"
    RELOAD = "reload"
    RESTORE = "restore"


OF_MODEL = (Kind.COLLECTIVE, Kind.AWAIT)
"""Kinds of the model's own communication."""

OF_HOST = (Kind.OFFLOAD, Kind.RELEASE, Kind.RELOAD, Kind.RESTORE)
"""Kinds that move an activation to the host's memory and back."""

OF_MANY = (Kind.COMPUTE, Kind.EXCHANGE, Kind.SCALES, *OF_MODEL, *OF_HOST)
"""Kinds about no bucket in particular, but about all that they read and write."""


TENSOR = "tensor"
"""The stream on which tensor-parallel ranks exchange parts of Muon's matrices."""


class Phase(StrEnum):
    """The program of a step that an event belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVAL = "eval"


@dataclass(frozen=True)
class Event:
    """One entry of a schedule: what it does, for which bucket, on which ranks, and why it is placed there.

    A runtime event belongs to one bucket. A ``COMPUTE`` event is the stretch of nodes between two runtime events: it
    has no bucket, but says which buckets' parameters it ``reads``, which gradient buckets it ``writes``, and what it
    costs. An ``UPDATE`` is the optimizer's work on one bucket. An ``EXCHANGE`` is an all-to-all of matrices of the
    buckets in ``reads``, to the ranks that orthogonalize them, or back to update the buckets in ``writes``; or, on the
    stream of replicas, it brings the parts of a shard that other replicas updated; or, on the stream ``tensor``, parts
    of matrices that are cut over tensor-parallel ranks go to the one that orthogonalizes them, and back. ``SCALES`` are
    those of all weights of the buckets in ``reads``, in one collective. A ``COLLECTIVE`` of the model's own reads the
    parameters of the buckets in ``reads`` until its ``AWAIT``, which has the same ``number``. An ``OFFLOAD`` copies one
    saved activation to the ``slot`` of the host's memory from which the ``RELOAD`` of the same ``number`` copies it
    back.
    """

    kind: Kind
    phase: Phase
    bucket: str
    bucket_index: int
    params: tuple[str, ...]
    bytes: int
    dtype: torch.dtype
    group: str
    stream: str
    why: str
    slot: SlotRange | None = None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    flops: int = 0
    traffic: int = 0
    """Bytes that a compute or update event reads from and writes to device memory."""
    held: int = 0
    """Bytes of activations alive after a compute event."""
    peak: int = 0
    """The most bytes of activations alive during a compute event or a collective of the model's own, temporaries
    included."""
    nodes: int = 0
    """Nodes of the graph in a stretch of compute."""
    waits_for: tuple[int, ...] = ()
    """Positions of the events that must be over before this one starts. A reshard and a finish: what ends there."""
    float8_flops: int = 0
    """The part of ``flops`` that products in float8 have."""
    copies: Copies = Copies.NONE
    """The quantized copies that a gather brings or a wait gives, where parameters rest quantized."""
    op: str = ""
    """Of a collective of the model's own, and of its await: ``all_reduce``, ``all_to_all_single``, … Of a copy to or
    from the host: the module and the operator whose result it is."""
    number: int = -1
    """Which of the model's own collectives of its phase it is, in the order in which the model makes them; or which of
    the step's offloaded activations, in the order in which they leave."""

    def with_slot(self, slot: SlotRange) -> Event:
        return replace(self, slot=slot)

    def with_needs(self, waits_for: tuple[int, ...]) -> Event:
        """Without ``dataclasses.replace``, which sets field by field: a search asks this of every event it tries."""
        other = object.__new__(Event)
        vars(other).update(vars(self), waits_for=waits_for)
        return other


def of_many(kind: Kind, phase: Phase, dtype: torch.dtype, why: str, **rest: Any) -> Event:
    """An event about no bucket in particular: on the compute stream and in no group, unless ``rest`` says otherwise."""
    usual: dict[str, Any] = {"params": (), "bytes": 0, "group": "", "stream": "compute"}
    return Event(kind, phase, "", -1, dtype=dtype, why=why, **{**usual, **rest})


def _unbound(op: str) -> NoReturn:
    raise RuntimeError(f"{op} is a schedule entry: bind the graph to a runtime (fxshard.runtime.program) to run it")


def unshard(bucket: str) -> None:
    """Start gathering the bucket."""
    _unbound("unshard")


def wait(bucket: str) -> tuple[torch.Tensor, ...]:
    """Until the gather is done; gives the unsharded parameters as views of the gathered buffer."""
    _unbound("wait")


def reshard(bucket: str) -> None:
    """Release the gathered buffer: nothing after this reads it."""
    _unbound("reshard")


def grad(bucket: str, zeros: tuple[int, ...] = ()) -> tuple[torch.Tensor, ...]:
    """Take a gradient bucket; gives one view per parameter to write to. ``zeros``: parameters nothing will write."""
    _unbound("grad")


def reduce(bucket: str) -> None:
    """Start reducing the gradient bucket: every write to it stands before this."""
    _unbound("reduce")


def all_reduce(bucket: str) -> None:
    """Start adding up the reduced shard over its replicas (HSDP), once the reduction is over."""
    _unbound("all_reduce")


def finish(bucket: str) -> None:
    """The reduction is over: the sharded gradient is there and the full gradient bucket is free again."""
    _unbound("finish")


def offload(value: torch.Tensor) -> torch.Tensor:
    """Start copying a value to the host; gives the copy, which is what forward saves."""
    _unbound("offload")


def release(value: torch.Tensor) -> None:
    """The copy to the host is over: the value may go."""
    _unbound("release")


def reload(copy: torch.Tensor) -> torch.Tensor:
    """Start copying a value back from the host; gives what it will be."""
    _unbound("reload")


def restore(value: torch.Tensor) -> torch.Tensor:
    """Until the copy from the host is over; gives the value."""
    _unbound("restore")


_OPS = (unshard, wait, reshard, grad, reduce, all_reduce, finish, offload, release, reload, restore)
OPS: dict[Kind, Callable[..., Any]] = {Kind(op.__name__): op for op in _OPS}

STREAM: dict[Kind, str] = {
    **dict.fromkeys(OPS, "compute"),
    Kind.UNSHARD: "gather",
    Kind.REDUCE: "reduce",
    Kind.ALL_REDUCE: "replicas",
    Kind.OFFLOAD: "host",
    Kind.RELOAD: "host",
}


def insert(
    graph: fx.Graph, kind: Kind, bucket: BucketPlan, *, phase: Phase, group: str, why: str, **args: Any
) -> fx.Node:
    """Insert a runtime node at the graph's insertion point and stamp it.

    ``group``: the process group of buckets that do not say which theirs is.
    """
    on_grads = kind in (Kind.GRAD, Kind.REDUCE, Kind.ALL_REDUCE, Kind.FINISH)
    over_replicas = kind is Kind.ALL_REDUCE
    dtype = bucket.reduce_dtype if on_grads else bucket.param_dtype
    size = bucket.grad_bytes if on_grads else bucket.gathered_bytes
    node = graph.call_function(OPS[kind], (bucket.name,), args)
    node.meta[META] = Event(
        kind=kind,
        phase=phase,
        bucket=bucket.name,
        bucket_index=bucket.index,
        params=bucket.params,
        bytes=size // bucket.layout.ranks if over_replicas else size,
        dtype=dtype,
        group=bucket.group(group, replicas=over_replicas),
        stream=STREAM[kind],
        why=why,
    )
    return node


def event_of(node: fx.Node) -> Event | None:
    """The record of a runtime node; None for a node that computes."""
    return node.meta.get(META)


def events(graph: fx.Graph) -> Iterator[tuple[fx.Node, Event]]:
    """Runtime nodes of a graph with their records, in program order."""
    for node in graph.nodes:
        event = event_of(node)
        if event is not None:
            yield node, event
