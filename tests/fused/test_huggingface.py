"""Mixtures of experts from transformers, unmodified."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxshard
from tests.hugging_face import SMALL

transformers = pytest.importorskip("transformers")

SIZES = SMALL | {"head_dim": 8, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24}


def build() -> Any:
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES))
    model.set_experts_implementation("grouped_mm")
    return model.train()


@pytest.mark.shows("G1")
def test_grouped_experts_train_as_one_graph_on_the_cpu() -> None:
    model = build()
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": tokens, "labels": tokens}
    loss = model(**inputs).loss
    loss.backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}

    report = fxshard.explain(model, inputs)
    assert len(report.fused) == 1 and "4 experts, SwiGLU, gate and up joined" in report.fused[0].form
    assert report.fused[0].where == "model.layers.0.mlp.experts"
    model.zero_grad()
    mine = torch.compile(model, backend="fxshard", fullgraph=True, options={"lowering": "eager"})(**inputs).loss
    mine.backward()
    assert mine.item() == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert (parameter.grad - theirs[name]).norm() <= 1e-5 * theirs[name].norm(), name
