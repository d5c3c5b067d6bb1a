"""Fused experts under sharding: the losses of the plain model, and no gathered weight kept for backward."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import fxshard
from tests.fused.moe import EXPERTS, moe
from tests.pool import Pool
from tests.toy import batch
from tests.training import VOCAB, Run, plain_run, sharded_run


def grouped_runs() -> dict[str, Run]:
    return {
        "fused": sharded_run(moe, zero=3, steps=3),
        "unfused": sharded_run(moe, zero=3, steps=3, experts="off"),
    }


@pytest.mark.shows("G3")
def test_zero_3_trains_like_experts_one_by_one(ranks: Pool) -> None:
    reference = plain_run(2, lambda: moe(grouped=False), steps=3)
    for runs in ranks(2, grouped_runs):
        for name, run in runs.items():
            assert run.losses == pytest.approx(reference.losses, rel=2e-6), name
            assert run.distance(reference) < 5e-6, name


def _graphs() -> dict[str, fx.GraphModule]:
    model = fxshard.compile(moe(), zero=3, lowering="eager")
    model(*batch(0, 1, 0, VOCAB)).backward()
    return model.graphs


def test_weights_are_not_saved_and_their_gradients_are_nodes_of_their_own() -> None:
    graphs = _graphs()
    assert "fxshard.grouped_swiglu." in str([str(node.target) for node in graphs["forward"].graph.nodes])
    for node in graphs["forward"].graph.output_node().all_input_nodes:
        value = node.meta.get("val")
        derived = isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[0] == EXPERTS
        assert not derived or node.op == "placeholder", f"{node} is a weight, or a view of one, and is saved"
    gradients = [n for n in graphs["backward"].graph.nodes if str(n.target).startswith("fxshard.grouped_wgrad")]
    assert len(gradients) == 4  # two weights in each of two layers
