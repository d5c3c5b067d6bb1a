"""Scheduling is pure: the same bytes in every process, and what it gives survives pickling."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch

from fxshard.frontend.lowering.programs import lower
from fxshard.frontend.lowering.segments import SegmentCompiler
from fxshard.frontend.planning import partition_model
from fxshard.frontend.sharding import plan_model
from fxshard.passes.options import Options
from fxshard.passes.scheduling import schedule
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.passes.stages import Scheduled
from fxshard.planner.domain import data_parallel
from fxshard.planner.hardware import hardware
from tests.passes import pickled
from tests.pool import Pool
from tests.toy import Llama


def scheduled() -> tuple[Scheduled, ShardingPlan]:
    with torch.device("meta"):
        model = Llama(layers=1)
    options = Options(lowering="eager", hardware="h200")
    buckets = plan_model(model, [data_parallel(8, 1, "mean", "cuda")], options)
    plan = ShardingPlan(buckets, options, ranks=8, hardware=hardware("h200"), own_optimizer=True, one_graph=True)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    return schedule(partition_model(model, (tokens, tokens), plan), plan), plan


@pytest.fixture(scope="module")
def here() -> tuple[Scheduled, ShardingPlan]:
    return scheduled()


def digest(given: Scheduled | None = None) -> tuple[int, str]:
    found = scheduled()[0] if given is None else given
    return hash("seed"), hashlib.sha256(pickled.dumps(found, shared=False)).hexdigest()


@pytest.mark.shows("A3")
def test_another_process_schedules_the_same_bytes(ranks: Pool, here: tuple[Scheduled, ShardingPlan]) -> None:
    """Whose hashes are others, unless their seed was given: the process that ranks are forked from has its own."""
    ((hashed, there),) = ranks(1, digest)
    seed, mine = digest(here[0])
    assert hashed != seed or os.environ.get("PYTHONHASHSEED", "random") != "random"
    assert there == mine


@pytest.mark.shows("A3")
def test_what_is_scheduled_survives_pickling(here: tuple[Scheduled, ShardingPlan]) -> None:
    mine, plan = here
    again = pickled.loads(pickled.dumps(mine))
    assert again.schedules == mine.schedules and again.memory == mine.memory
    assert {phase: str(module.graph) for phase, module in again.graphs.items()} == {
        phase: str(module.graph) for phase, module in mine.graphs.items()
    }
    programs = {}
    for name, each in (("mine", mine), ("again", again)):
        compiler = SegmentCompiler("eager")
        lowered = lower(each, plan, compiler, torch.device("cpu"))
        programs[name] = compiler.segments, compiler.compilations, [len(each.instructions) for each in lowered.values()]
    assert programs["mine"] == programs["again"]
