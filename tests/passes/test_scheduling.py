"""Scheduling is pure: the same graphs, schedules and places in every process."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch

from fxshard.frontend.planning import partition_model
from fxshard.frontend.sharding import plan_model
from fxshard.passes.options import Options
from fxshard.passes.scheduling import schedule
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.planner.domain import data_parallel
from fxshard.planner.hardware import hardware
from tests.pool import Pool
from tests.toy import Llama


def digest() -> tuple[int, str]:
    with torch.device("meta"):
        model = Llama(layers=1)
    options = Options(lowering="eager", hardware="h200")
    buckets = plan_model(model, [data_parallel(8, 1, "mean", "cuda")], options)
    plan = ShardingPlan(buckets, options, ranks=8, hardware=hardware("h200"), own_optimizer=True, one_graph=True)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    made = schedule(partition_model(model, (tokens, tokens), plan), plan)
    graphs = {phase: str(module.graph) for phase, module in made.graphs.items()}
    written = repr((graphs, {name: each.to_json() for name, each in made.schedules.items()}, made.memory))
    return hash("seed"), hashlib.sha256(written.encode()).hexdigest()


@pytest.mark.shows("A3")
def test_another_process_schedules_the_same_bytes(ranks: Pool) -> None:
    """Whose hashes are others, unless their seed was given: the process that ranks are forked from has its own."""
    ((hashed, there),) = ranks(1, digest)
    assert hashed != hash("seed") or os.environ.get("PYTHONHASHSEED", "random") != "random"
    assert there == digest()[1]
