"""What the benchmarks train, by name: the same model for every contender."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fxshard.bench.contenders import blocks
from fxshard.bench.train import Contender
from fxshard.bench.workloads import SIZES, Workload, loss_of

CPU = torch.device("cpu")
KINDS = ("llama", "qwen3", "gemma3", "qwen3-moe")


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers_are_as_large_as_ours(kind: str) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    model, _ = Workload(f"hf:{kind}").build(torch.device("meta"))
    ours, _ = Workload("moe-1b" if kind == "qwen3-moe" else "1b").build(torch.device("meta"))
    counts = [sum(parameter.numel() for parameter in each.parameters()) for each in (model, ours)]
    assert counts[0] == pytest.approx(counts[1], rel=0.01)
    assert len(blocks(model)) == len(blocks(ours)) == SIZES[f"hf:{kind}"].config.layers


@pytest.mark.parametrize(
    ("variant", "differs"),
    [("large_vocabulary", {"vocab_size": 128256}), ("window", {"sliding_window": 1024}), ("packed", {})],
)
def test_variants_differ_from_the_llama_in_one_thing(variant: str, differs: dict[str, int]) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    meta = torch.device("meta")
    model, inputs = Workload(f"fxshard.bench.variants:{variant}", cache=False).build(meta)
    plain, expected = Workload("hf:llama", cache=False).build(meta)
    compared = {**plain.config.to_dict(), **differs}
    assert all(getattr(model.config, name) == compared[name] for name in ("hidden_size", "vocab_size", *differs))
    assert len(blocks(model)) == len(blocks(plain)) and inputs["input_ids"].shape == expected["input_ids"].shape
    assert ("position_ids" in inputs) == (variant == "packed")


@pytest.mark.parametrize(
    ("variant", "billions"), [("llama_8b", 8.03), ("llama_8b_layers", 2.01), ("moe_16b", 16.1), ("lora_8b", 8.07)]
)
def test_large_models(variant: str, billions: float) -> None:
    pytest.importorskip("peft", reason="needs the integrations extra")
    model, inputs = Workload(f"fxshard.bench.variants:{variant}", cache=False).build(torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(billions * 1e9, rel=0.005)
    assert inputs["input_ids"].shape[1] == 4096


@pytest.mark.thorough
def test_the_base_of_qlora_rests_in_four_bits() -> None:
    """Linears of the layers, 6.98 B numbers, take a little more than half a byte each, and not two."""
    pytest.importorskip("peft", reason="needs the integrations extra")
    model, _ = Workload("fxshard.bench.variants:qlora_8b", cache=False).build(torch.device("meta"))
    plain, _ = Workload("fxshard.bench.variants:lora_8b", cache=False).build(torch.device("meta"))
    quantized, whole = (sum(parameter.nbytes for parameter in each.parameters()) for each in (model, plain))
    linears = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert whole - quantized == linears * 2 - linears * 9 // 16
    assert [p.numel() for p in model.parameters() if p.requires_grad] == [
        p.numel() for p in plain.parameters() if p.requires_grad
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers_are_called_as_users_do(kind: str) -> None:
    """With the cache they fill by default, unless it is switched off; the loss is the same."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    losses = []
    for cache in (True, False):
        model, inputs = Workload(f"hf:{kind}-toy", layers=2, batch=1, cache=cache).build(CPU)
        assert isinstance(inputs, dict) and inputs["input_ids"].shape == (1, 128)
        assert (model(**inputs).past_key_values is not None) == cache and model.training
        losses.append(loss_of(model, inputs).item())
    assert losses[0] == losses[1]


def test_the_same_from_one_contender_to_the_next() -> None:
    first, second = (loss_of(*Workload("toy", layers=1, batch=1).build(CPU)).item() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("inputs", ["x", "(x,)", "{'x': x}"])
def test_a_factory_returns_a_model_and_its_batch(inputs: str, tmp_path: Path) -> None:
    """Its output is the loss, or has one; a mapping of inputs is passed by name."""
    source = f"""
import torch
from types import SimpleNamespace

class Net(torch.nn.Linear):
    def forward(self, x):
        return SimpleNamespace(loss=super().forward(x).sum())

def build(layers=1):
    x = torch.ones(1, 2)
    return Net(2, layers), {inputs}
"""
    (tmp_path / "user_model.py").write_text(source)
    model, batch = Workload(f"{tmp_path}/user_model.py:build", layers=3).build(CPU)
    assert isinstance(model, nn.Linear) and model.out_features == 3
    assert loss_of(model, batch).shape == ()


def test_blocks_are_layers_and_not_the_experts_of_one() -> None:
    experts = [nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(1, 1) for _ in range(8))}) for _ in range(3)]
    model = nn.ModuleDict({"layers": nn.ModuleList(experts), "heads": nn.ModuleList([nn.Linear(1, 1)])})
    assert blocks(model) == list(model["layers"])
    assert len(blocks(nn.Linear(1, 1))) == 0


@pytest.mark.thorough
def test_micro_batches_add_up_to_one_step() -> None:
    """Twice the gradient of one: the learning rate is zero, so every micro-batch has the same."""
    norms: list[float] = []

    def make(model: nn.Module, _: object) -> tuple[nn.Module, torch.optim.Optimizer]:
        weight: torch.Tensor = model.head.weight  # type: ignore[assignment,union-attr]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: norms.append(float(weight.grad.norm())))
        return model, optimizer

    for micro_batches in (1, 2):
        Contender("plain", Workload("toy", layers=1, batch=1), CPU, False, make, micro_batches)
    assert norms[-1] == pytest.approx(2 * norms[0], rel=1e-5)
