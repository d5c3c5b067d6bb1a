"""peft: adapters train on sharded base weights, and are saved as peft saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from tests.integrations.launched import llama, rows
from tests.pool import Pool
from tests.thorough import thorough

pytest.importorskip("peft", reason="needs peft: pip install peft")

STEPS = 3


def adapted(dora: bool, checkpointed: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    modules = ["q_proj"] if dora else ["q_proj", "v_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=modules, use_dora=dora, task_type="CAUSAL_LM")
    model = get_peft_model(llama(), config)
    if checkpointed:
        model.train().gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model


def batch(step: int, ranks: list[int]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([rows(2 * STEPS)[2 * step + rank]["input_ids"] for rank in ranks])
    return {"input_ids": tokens, "labels": tokens}


def train(model: nn.Module, ranks: list[int]) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step, ranks)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(folder: str, dora: bool, checkpointed: bool) -> dict[str, Any]:
    # DoRA asks for the module of a parameter's class, which Dynamo cannot trace: its graph breaks.
    model = fxshard.compile(adapted(dora, checkpointed), lowering="eager", fullgraph=not dora)
    before = model.full_state_dict()
    losses = train(model, [dist.get_rank()])
    model.save_pretrained(folder)
    after = model.full_state_dict()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {
        "losses": losses,
        "changed": sorted(name for name in after if not torch.equal(before[name], after[name])),
        "frozen": frozen,
        "trained": {name: after[name] for name in after if "lora_" in name},
        "counted": model.get_nb_trainable_parameters(),
    }


@pytest.mark.shows("I5")
@pytest.mark.parametrize(("dora", "checkpointed"), [(False, False), thorough(True, False), (False, True)])
def test_adapters_train_and_the_base_stays(ranks: Pool, tmp_path: Path, dora: bool, checkpointed: bool) -> None:
    from peft import PeftModel

    found = ranks(2, run, str(tmp_path), dora, checkpointed)
    plain = adapted(dora, checkpointed)
    expected = train(plain, [0, 1])
    means = [sum(losses) / 2 for losses in zip(*(each["losses"] for each in found), strict=True)]
    assert means == pytest.approx(expected, rel=1e-5)
    mine = found[0]
    assert mine["changed"] and not mine["frozen"] & {*mine["changed"]}, "base weights are bitwise what they were"
    assert mine["counted"] == plain.get_nb_trainable_parameters()
    loaded = PeftModel.from_pretrained(llama(), tmp_path)
    weights = loaded.state_dict()
    assert len(mine["trained"]) == len([name for name in weights if "lora_" in name]) > 0
    for name, value in mine["trained"].items():
        assert torch.equal(weights[name], value), name
    assert not (tmp_path / "model.safetensors").exists()
