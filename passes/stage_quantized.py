"""Forward, backward, evaluation: parameters that rest quantized are read as they are, not quantized again.

Requires ``quantize_linears`` and ``insert_unshard``. A ``wait`` of a staged or direct bucket gives four views of each
parameter (rowwise payload and scales, columnwise payload and scales; of float8 with one scale for both directions the
first two); they replace the graph's own quantization of the gathered parameter. What a gather of a direct bucket brings
is stamped on it: the copies that this graph reads, as a rule the rowwise ones in forward and the columnwise ones in
backward; of a bucket that stays in memory all there are. The staging write is part of the gather.
"""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from fxshard._torch.errors import PassError
from fxshard.kernels.float8_ops import float8_quantize
from fxshard.kernels.mxfp8 import COLUMNWISE, E4M3, ROWWISE
from fxshard.kernels.mxfp8_ops import mxfp8_quantize
from fxshard.passes.context import PassContext
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.gather_modes import Copies, Gather, copies
from fxshard.planner.gathered import VIEWS
from fxshard.schedule.events import META, Kind, events


def stage_quantized(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    brought: dict[int, Copies] = {}
    for wait, event in list(events(graph)):
        bucket = context.buckets[event.bucket_index]
        if event.kind is Kind.WAIT and bucket.rests_quantized:
            axes = _read_copies(graph, wait, bucket, context)
            brought[bucket.index] = copies(rowwise=ROWWISE in axes, columnwise=COLUMNWISE in axes)
    for node, event in list(events(graph)):
        if event.kind in (Kind.UNSHARD, Kind.WAIT) and event.bucket_index in brought:
            bucket, read = context.buckets[event.bucket_index], brought[event.bucket_index]
            if event.kind is Kind.UNSHARD and bucket.resident and bucket.gather is Gather.DIRECT:
                read = bucket.all_copies
            stamped = replace(event, copies=read)
            if bucket.gather is Gather.DIRECT:
                stamped = replace(stamped, bytes=read.number * bucket.copy_bytes(bucket.layout.numel), dtype=E4M3)
            node.meta[META] = stamped
    return module


def _read_copies(graph: fx.Graph, wait: fx.Node, bucket: BucketPlan, context: PassContext) -> set[int]:
    """Let the graph read what ``wait`` gives in place of what it quantized; returns the directions it reads."""
    axes: set[int] = set()
    given: dict[int, fx.Node] = {}
    for view in list(wait.users):
        position = view.args[1]
        assert isinstance(position, int)
        for quantize in list(view.users):
            if quantize.target not in (mxfp8_quantize, float8_quantize):
                policy, off = ("MXFP8", "off") if bucket.float8 is None else ("Float8", "bf16")
                raise PassError(
                    f"{bucket.params[position]!r} rests in {policy}, but the {context.phase} graph uses it in "
                    f"{quantize.target}: exclude its linear from {policy}, or use {policy}(gather={off!r})"
                )
            axis = quantize.args[-1]
            assert isinstance(axis, int)
            axes.add(axis)
            for part in list(quantize.users):
                index = VIEWS * position + (2 if axis == COLUMNWISE else 0) + int(part.args[1])  # type: ignore[arg-type]
                if index not in given:
                    with graph.inserting_after(wait):
                        given[index] = graph.call_function(operator.getitem, (wait, index))
                    given[index].meta["val"] = part.meta["val"]
                part.replace_all_uses_with(given[index])
                graph.erase_node(part)
            graph.erase_node(quantize)
        graph.erase_node(view)
    wait.meta["val"] = (None,) * (VIEWS * len(bucket.params))
    return axes
