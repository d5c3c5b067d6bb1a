"""LoRA on stacked experts (``target_parameters`` of peft): trained, saved and loaded as with peft in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxshard
from tests.hugging_face import SMALL
from tests.integrations.launched import rows
from tests.pool import Pool
from tests.thorough import thorough
from tests.training import full_gradients

pytest.importorskip("peft", reason="needs peft: pip install peft")

STEPS = 3
BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Two parameters of one module: one wrapper around the other."""


def base(kind: str, implementation: str = "grouped_mm") -> Any:
    import transformers as hf

    torch.manual_seed(0)
    experts: dict[str, Any] = {"num_experts_per_tok": 2, "head_dim": 8}
    if kind == "mixtral":
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, **experts, num_local_experts=4))
    elif kind == "gpt-oss":
        experts |= {"layer_types": ["full_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        model = hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, **experts, num_local_experts=4))
    else:
        experts |= {"num_experts": 4, "moe_intermediate_size": 16}
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SMALL, **experts))
    model.set_experts_implementation(implementation)
    return model


def adapters(parameters: tuple[str, ...] = BOTH, modules: tuple[str, ...] = ("q_proj",), r: int = 4) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=r, lora_alpha=8, target_modules=list(modules), target_parameters=list(parameters), init_lora_weights=False
    )


def adapted(kind: str = "qwen3-moe", implementation: str = "grouped_mm", **config: Any) -> Any:
    from peft import get_peft_model

    return get_peft_model(base(kind, implementation), adapters(**config))


def batch(step: int, ranks: list[int]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([rows(2 * STEPS)[2 * step + rank]["input_ids"] for rank in ranks])
    return {"input_ids": tokens, "labels": tokens}


def train(model: Any, ranks: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the gradients of the first step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = model(**batch(step, ranks)).loss
        loss.backward()
        if step == 0:
            gradients = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    if hasattr(model, "schedule"):
        return full_gradients(model)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=batch(0, [0, 1])["input_ids"]).logits  # type: ignore[no-any-return]


def agree(mine: dict[str, torch.Tensor], peer: dict[str, torch.Tensor], bound: float) -> None:
    assert mine.keys() == peer.keys()
    assert any("experts.lora_A" in name for name in peer) and any("experts.base_layer.lora_B" in name for name in peer)
    for name, value in peer.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=bound * value.abs().max().item(), msg=name)


def trained(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if "lora_" in name}


def run(folder: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    from peft import PeftModel

    model = fxshard.compile(adapted(kind), lowering="eager", **options)
    before = model.full_state_dict()
    counted = model.get_nb_trainable_parameters()
    losses, gradients = train(model, [dist.get_rank()])
    model.save_pretrained(folder)
    fxshard.save(model, f"{folder}/checkpoint", frozen=False)
    found = {
        "counted": counted, "losses": losses, "gradients": gradients, "after": model.full_state_dict(),
        "before": before, "logits": logits(model),
        "captures": model.report.compilations.captures, "fused": len(model.report.experts.fused),
    }  # fmt: skip
    loaded = PeftModel.from_pretrained(base(kind), folder, is_trainable=True)
    found["again"] = fxshard.shard(loaded, **options).full_state_dict()
    fresh = fxshard.shard(adapted(kind), **options)
    fxshard.load(fresh, f"{folder}/checkpoint")
    found["loaded"] = fresh.full_state_dict()
    return found


@pytest.mark.shows("I5")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3-moe", {"zero": 3}),
        thorough("qwen3-moe", {"zero": 0}),
        thorough("mixtral", {"zero": 2}),
        thorough("gpt-oss", {"zero": 3}),
        thorough("gpt-oss", {"zero": 1}),
    ],
)
def test_stacked_experts_train_on_two_ranks(ranks: Pool, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    from peft import PeftModel

    found = ranks(2, run, str(tmp_path), kind, options, timeout=350)
    plain = adapted(kind)
    losses, gradients = train(plain, [0, 1])
    means = [sum(each) / 2 for each in zip(*(rank["losses"] for rank in found), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    mine = found[0]
    assert mine["captures"] == 2 and mine["fused"] == 1, "one graph for training, one for evaluation"
    assert mine["counted"] == plain.get_nb_trainable_parameters()
    agree(mine["gradients"], gradients, 1e-4)
    agree(trained(mine["after"]), trained(plain.state_dict()), 1e-3)
    for name, value in mine["before"].items():
        assert torch.equal(value, mine["after"][name]) != ("lora_" in name), name
    for other in found:
        torch.testing.assert_close(other["logits"], logits(plain), rtol=0, atol=1e-4)
        for again in (other["again"], other["loaded"]):
            assert again.keys() == other["after"].keys()
            assert all(torch.equal(value, other["after"][name]) for name, value in again.items())

    loaded = PeftModel.from_pretrained(base(kind), tmp_path)
    weights = loaded.state_dict()
    assert weights.keys() == mine["after"].keys()
    assert all(torch.equal(weights[name], value) for name, value in mine["after"].items())
    torch.testing.assert_close(logits(loaded), mine["logits"], rtol=0, atol=1e-6)


def same_step(mine: Any, peer: Any, **options: Any) -> Any:
    """The compiled model, after a step that gave what the plain one gives."""
    model = fxshard.compile(mine, lowering="eager", **options)
    results = [each(**batch(0, [0, 1])) for each in (model, peer)]
    for result in results:
        result.loss.backward()
    assert results[0].loss.item() == pytest.approx(results[1].loss.item(), rel=1e-6)
    found, expected = gradients_of(model), gradients_of(peer)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5 * value.abs().max().item(), msg=name)
    torch.testing.assert_close(logits(model), logits(peer), rtol=0, atol=1e-6)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize(
    "parameters",
    [
        ("mlp.experts.down_proj",),
        ("mlp.experts.gate_up_proj_bias", "mlp.router.weight", "mlp.experts.gate_up_proj"),
    ],
)
def test_one_of_two_parameters_and_matrices(parameters: tuple[str, ...]) -> None:
    """Parameters of two dimensions count as one expert; modules are not adapted besides."""
    config: dict[str, Any] = {"parameters": parameters, "modules": ()}
    same_step(adapted("gpt-oss", **config), adapted("gpt-oss", **config))


def with_two(active: list[str]) -> Any:
    model = adapted()
    model.add_adapter("other", adapters(r=2))
    model.base_model.set_adapter(active)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("active", [["other"], ["default", "other"]])
def test_several_adapters(active: list[str]) -> None:
    same_step(with_two(active), with_two(active))


def test_adapters_that_are_switched_off() -> None:
    model, plain = fxshard.compile(adapted(), lowering="eager"), adapted()
    expected = logits(plain)
    with plain.disable_adapter(), model.disable_adapter():
        without = logits(plain)
        torch.testing.assert_close(logits(model), without, rtol=0, atol=1e-6)
    assert not torch.allclose(without, expected, atol=1e-3)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)


@pytest.mark.thorough
def test_adapters_that_are_merged_before_or_are_on_modules_alone() -> None:
    merged, plain, other = adapted(), adapted(), adapted()
    merged.merge_adapter()
    found = logits(fxshard.compile(merged, lowering="eager"))
    torch.testing.assert_close(found, logits(plain), rtol=0, atol=1e-6)
    other.add_adapter("other", adapters(parameters=()))
    other.set_adapter("other")
    plain.add_adapter("other", adapters(parameters=()))
    plain.set_adapter("other")
    plain.load_state_dict(other.state_dict())
    same_step(other, plain)


@pytest.mark.parametrize("how", ["checkpointed", thorough("loop over experts")])
def test_other_ways_to_run_experts(how: str) -> None:
    """A loop over the experts that have tokens breaks the graph, with adapters as without."""
    implementation = "grouped_mm" if how == "checkpointed" else "eager"
    mine, peer = (adapted(implementation=implementation) for _ in range(2))
    for model in (mine, peer) if how == "checkpointed" else ():
        model.gradient_checkpointing_enable()
    model = same_step(mine.train(), peer.train(), fullgraph=how == "checkpointed")
    assert bool(model.report.graph_breaks) == (how != "checkpointed")


@pytest.mark.thorough
def test_autocast_leaves_the_dtype_of_adapted_weights() -> None:
    mine, peer = fxshard.compile(adapted(), lowering="eager"), adapted()
    with torch.autocast("cpu", torch.bfloat16):
        assert mine(**batch(0, [0])).loss.item() == pytest.approx(peer(**batch(0, [0])).loss.item(), rel=1e-4)


def test_a_plan_is_that_of_the_run_and_leaves_the_model_to_peft() -> None:
    model, inputs = adapted(), batch(0, [0])
    expected = logits(model)
    planned = fxshard.plan(model.train(), inputs, world_size=1, hardware="cpu", lowering="eager")
    (fused,) = fxshard.explain(model, inputs).fused
    assert fused.where == "base_model.model.model.layers.0.mlp.experts.base_layer.base_layer"
    without = fxshard.plan(adapted(parameters=()).train(), inputs, world_size=1, hardware="cpu", lowering="eager")
    assert planned.saved_bytes - without.saved_bytes < 4 * 16 * 32 * 4, "adapted weights are not saved for backward"
    assert torch.equal(logits(model), expected)
    assert repr(model) == repr(adapted()) and model.state_dict().keys() == adapted().state_dict().keys()
    model.add_adapter("other", adapters(r=2))  # which looks for wrappers by name
    model.merge_and_unload()
    compiled = fxshard.compile(adapted(), lowering="eager")
    compiled(**inputs).loss.backward()
    assert planned == compiled.schedule and planned.peak_bytes == compiled.schedule.peak_bytes


def test_weights_in_mxfp8_are_refused_by_name() -> None:
    """An adapted weight is another tensor than the parameter: there is nothing to keep quantized."""
    mxfp8 = fxshard.MXFP8(exclude=("*lora*", "*head"))
    with pytest.raises(fxshard.FxshardError, match=r"gate_up_proj' is to run in MXFP8.*baddbmm.*exclude="):
        fxshard.compile(adapted().bfloat16(), lowering="eager", precision=mxfp8)(**batch(0, [0]))
