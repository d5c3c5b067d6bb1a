"""Layers of a known model that Dynamo does not trace: the schedule is that of a capture of all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxshard
from fxshard.bench import captured as bench
from fxshard.bench.models import MLP, LanguageModel
from fxshard.frontend.absent_layers import AbsentLayers, LayersDifferError
from fxshard.frontend.planning import partition_model
from fxshard.frontend.sharding import plan_model
from fxshard.passes.options import Options
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.planner.domain import data_parallel
from fxshard.planner.hardware import hardware
from tests.thorough import thorough

LAYERS = 10
DIM = 64
TOKENS = torch.zeros(2, 16, dtype=torch.long)


class Layer(nn.Module):
    """Half of a transformer's, which is captured in half the time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(DIM), MLP(DIM, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def deep() -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(128, DIM, (Layer() for _ in range(LAYERS)))


def partitioned(model: LanguageModel, absent: AbsentLayers) -> None:
    options = Options(lowering="eager", hardware="h200")
    buckets = plan_model(model, [data_parallel(8, 1, "mean", "cuda")], options)
    plan = ShardingPlan(buckets, options, ranks=8, hardware=hardware("h200"), one_graph=True)
    partition_model(model, (TOKENS, TOKENS), plan, absent=absent)


def test_the_schedule_is_that_of_all_layers() -> None:
    model, adamw = deep(), fxshard.AdamW()
    assert AbsentLayers.of("layers", LAYERS) == AbsentLayers("layers", range(5, LAYERS - 4))
    step = bench.capture(model, (TOKENS, TOKENS), lowering="eager")
    assert step.partitions[0].layers_folded == LAYERS - 5
    found = step.schedule(ranks=8, hardware="h200", optimizer=adamw)
    whole = fxshard.plan(model, (TOKENS, TOKENS), world_size=8, hardware="h200", lowering="eager", optimizer=adamw)
    assert found.events == whole.events
    assert (found.peak_bytes, found.arena_bytes) == (whole.peak_bytes, whole.arena_bytes)


@pytest.mark.parametrize("layer", [thorough(3), 5])
def test_a_layer_that_differs_is_found_whether_it_is_captured_or_absent(layer: int) -> None:
    model = deep()
    with torch.device("meta"):
        model.layers[layer].mlp = MLP(DIM, 192)
    absent = AbsentLayers.of("layers", LAYERS)
    assert absent is not None
    with pytest.raises(LayersDifferError, match="layers do not repeat"):
        partitioned(model, absent)


def test_few_layers_are_all_captured() -> None:
    assert AbsentLayers.of("layers", 9) is None
