"""Rules for a schedule's header and its table of buckets, on which all other rules rely."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import groupby

import torch

from fxshard.kernels.mxfp8 import BLOCK
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.domain import ZERO, Placement
from fxshard.planner.gather_modes import Float8Recipe, Gather
from fxshard.planner.layout import Layout, aligned
from fxshard.planner.memory import GRANULE
from fxshard.planner.parts import Cuts
from fxshard.planner.rows import row_layout
from fxshard.planner.state import FORMATS, OFFLOADS, StateChoice
from fxshard.schedule.accumulation import kept_bytes
from fxshard.schedule.events import OF_HOST, Kind
from fxshard.schedule.record import resident_bytes
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.step import Step

MOST_RANKS = 2**24
"""More ranks than any cluster has. Some rules look at every rank."""


def header_is_possible(step: Step) -> None:
    """``ranks``, ``zero`` and ``budget`` are what they can be, and fit the domains of the buckets."""
    schedule = step.schedule
    if not 1 <= schedule.ranks <= MOST_RANKS:
        step.fails(header_is_possible, f"ranks is {schedule.ranks}")
    if schedule.zero not in ZERO:
        step.fails(header_is_possible, f"zero is {schedule.zero}: there are stages 0 to 3")
    if schedule.budget is not None and schedule.budget <= 0:
        step.fails(header_is_possible, f"budget is {schedule.budget} bytes")
    domains = {bucket.domain for bucket in schedule.buckets}
    for domain in domains:
        counts = domain.shards, domain.replicas, domain.stride
        if not 1 <= min(counts) <= max(counts) <= MOST_RANKS or not 0 < domain.divisor < math.inf:
            step.fails(header_is_possible, f"{domain} is no set of ranks")
        if (domain.name and domain.ranks > schedule.ranks) or (not domain.name and domain.ranks != schedule.ranks):
            step.fails(header_is_possible, f"{domain} has {domain.ranks} ranks, but ranks is {schedule.ranks}")
        if not domain.name and domain.divisor not in (1, domain.ranks):
            step.fails(header_is_possible, f"{domain} divides neither by 1 nor by its {domain.ranks} ranks")
    if len({domain.device for domain in domains if domain.ranks > 1}) > 1:
        step.fails(header_is_possible, f"domains are on different devices: {sorted(domains, key=repr)}")
    if len({domain.name for domain in domains}) < len(domains):
        step.fails(header_is_possible, f"two domains have the same name: {sorted(domains, key=repr)}")


def buckets_are_possible(step: Step) -> None:
    """Every bucket is one that the planner makes under this ZeRO stage: placement, layout and dtypes fit together."""
    checked: set[Layout] = set()
    names: set[str] = set()
    for i, bucket in enumerate(step.schedule.buckets):
        problems = _problems(bucket, i, step.schedule)
        what = next(problems, "")
        if not what and bucket.name in names:
            what = "has the name of another one"
        if not what and bucket.layout not in checked and not _is_dense(bucket.layout):
            what = f"has gaps in its layout, or shards of {bucket.layout.shard_numel} elements that need fewer or more"
        if what:
            step.fails(buckets_are_possible, f"bucket {i} ({bucket.name!r}) {what}")
        names.add(bucket.name)
        checked.add(bucket.layout)


def _problems(bucket: BucketPlan, i: int, schedule: Schedule) -> Iterator[str]:
    """What is wrong with a bucket."""
    specs = [slot.spec for slot in bucket.layout.slots]
    if bucket.index != i:
        yield f"says that it is number {bucket.index}"
    if not re.fullmatch(rf"{re.escape(bucket.unit)}( \[.*\])?", bucket.name, re.DOTALL):
        yield f"is not named after its unit {bucket.unit!r}"
    stage = ZERO[schedule.zero]
    if specs and all(spec.shape == () for spec in specs):
        stage = ZERO[0]
    elif not bucket.trainable:
        stage = Placement(stage.param, False, stage.param)
    if bucket.placement != stage:
        yield f"has {bucket.placement} under ZeRO {schedule.zero}, where it is {stage}"
    shards = bucket.domain.shards if bucket.placement.state else 1
    if bucket.layout.ranks != shards:
        yield f"is laid out over {bucket.layout.ranks} ranks, but its domain has {shards} shards"
    if bucket.domain.name and not all(fnmatchcase(name, bucket.domain.name) for name in bucket.params):
        yield f"has parameters that {bucket.domain.name!r} does not match"
    dtypes = (bucket.param_dtype, bucket.master_dtype, bucket.reduce_dtype)
    if bucket.trainable and not all(dtype.is_floating_point for dtype in dtypes):
        yield "is trained in a dtype that is not floating-point"
    if not bucket.trainable and bucket.master_dtype != bucket.param_dtype:
        yield f"is frozen, but has masters in {bucket.master_dtype} of parameters in {bucket.param_dtype}"
    if not set(bucket.matrices) <= set(bucket.params) or len(set(bucket.matrices)) < len(bucket.matrices):
        yield f"has the matrices {bucket.matrices}, which are not parameters of it"
    if bucket.matrices and not bucket.trainable:
        yield "is frozen, but has matrices for Muon"
    if bucket.row_moments and not bucket.matrices:
        yield "has second moments of rows, but no matrices for Muon"
    if bucket.quantized and bucket.param_dtype != torch.bfloat16:
        yield f"is quantized from {bucket.param_dtype}, not from bfloat16"
    if bucket.rests_quantized and bucket.float8 is None and (bucket.gather is Gather.STAGED) != bucket.resident:
        yield f"is gathered {bucket.gather}, but is {'' if bucket.resident else 'not '}resident"
    if bucket.quantized and any(len(spec.shape) < 2 for spec in specs):
        yield "is to be quantized, but not all of it are matrices"
    if bucket.shares_state and not bucket.adds_replicas:
        yield "shares optimizer state over replicas that it does not have"
    if bucket.state not in FORMATS or bucket.offload not in OFFLOADS:
        yield f"keeps optimizer state as {bucket.state!r}, offloaded to {bucket.offload!r}"
    elif not StateChoice(bucket.state, bucket.offload).plain and not (
        bucket.trainable and bucket.master_dtype == torch.float32
    ):
        yield f"keeps optimizer state as {bucket.state!r}, offloaded to {bucket.offload!r}, and has no fp32 to update"
    if bucket.float8 is not None and not isinstance(bucket.float8, Float8Recipe):
        yield f"has {bucket.float8!r} for a recipe of float8"
    if bucket.float8 is not None and bucket.gather not in (Gather.OFF, Gather.DIRECT):
        yield f"is in float8, but is gathered {bucket.gather}"
    cut = BLOCK if bucket.float8 is None else bucket.float8.cut
    if bucket.cuts is not None:
        yield from _cuts_amiss(bucket, schedule)
    for spec in specs:
        if spec.cut_rows != (cut if bucket.quantized and len(spec.shape) == 2 else 1):
            yield f"cuts {spec.name} every {spec.cut_rows} rows"


def _cuts_amiss(bucket: BucketPlan, schedule: Schedule) -> Iterator[str]:
    """What is wrong with what a bucket says of matrices that are cut over tensor-parallel ranks."""
    cuts, names = bucket.cuts, {*bucket.matrices}
    if not isinstance(cuts, Cuts):
        yield f"has {cuts!r} for matrices that are cut over tensor-parallel ranks"
        return
    group = cuts.group
    if not 2 <= group.ranks <= MOST_RANKS or not 1 <= group.stride <= MOST_RANKS or not group.label:
        yield f"has matrices that are cut over {group}, which is no group of several ranks"
    if any(other.cuts is not None and other.cuts.group != group for other in schedule.buckets):
        yield f"has matrices that are cut over {group}, and another bucket over another group"
    cut = [whole.name for whole in cuts.wholes]
    if not cut or cut != [name for name in bucket.matrices if name in cuts.whole] or not names.issuperset(cut):
        yield f"has {cut} cut over tensor-parallel ranks, which are not matrices of it, each once and in order"
        return
    for slot in bucket.layout.slots:
        name, shape = slot.spec.name, slot.spec.shape
        if name in cuts.whole and cuts.dim(name, shape) is None:
            yield f"has {name} of shape {shape}, which is no part of {group.ranks} of a matrix {cuts.whole[name]}"
    if bucket.row_moments:
        yield "has second moments of whole rows, but matrices that are cut over tensor-parallel ranks"


def _is_dense(layout: Layout) -> bool:
    """Whether parameters stand where the planner puts them: rows one after another, or each rank's from its start."""
    if not layout.whole:
        return layout == row_layout([slot.spec for slot in layout.slots], layout.ranks)
    if not layout.shard_numel:
        return True
    longest = 0
    for rank, slots in groupby(layout.slots, key=lambda slot: slot.offset // layout.shard_numel):
        cursor = rank * layout.shard_numel
        for slot in slots:
            if slot.offset != cursor:
                return False
            cursor += aligned(slot.spec.numel)
        longest = max(longest, cursor - rank * layout.shard_numel)
    return longest == layout.shard_numel


def memory_is_what_it_says(step: Step) -> None:
    """``resident_bytes`` is what the buckets hold at rest, ``arena_bytes`` reaches to the end of the last slot."""
    schedule = step.schedule
    kinds = {event.kind for event in schedule.events}
    at_rest = resident_bytes(schedule.buckets)
    kept = at_rest + kept_bytes(schedule.buckets)
    # Where nothing is reduced, both are right: a step, or a micro-batch inside no_sync.
    allowed = {at_rest} if Kind.REDUCE in kinds else {kept} if Kind.ACCUMULATE in kinds else {at_rest, kept}
    if schedule.resident_bytes not in allowed:
        holds = " or ".join(map(str, sorted(allowed)))
        step.fails(memory_is_what_it_says, f"resident_bytes is {schedule.resident_bytes}, but buckets hold {holds}")
    in_arena = [event.slot for event in schedule.events if event.slot is not None and event.kind not in OF_HOST]
    end = max((aligned(slot.end, GRANULE) for slot in in_arena), default=0)
    if schedule.arena_bytes != end:
        step.fails(memory_is_what_it_says, f"arena_bytes is {schedule.arena_bytes}, but the last slot ends at {end}")
