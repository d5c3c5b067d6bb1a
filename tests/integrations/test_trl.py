"""TRL's trainers with fxshard on two ranks: the losses of the same trainers without it (which is DDP there)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.launched import VOCAB, launched, llama, rows
from tests.pool import Pool

pytest.importorskip("trl", reason="needs TRL: pip install trl")

STEPS = 4
SETTINGS = {
    "per_device_train_batch_size": 1, "max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True,
    "bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
}  # fmt: skip


def tokenizer() -> Any:
    """Words w0 … w59 are tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    words = Tokenizer(models.WordLevel(special | {f"w{i}": i + 3 for i in range(VOCAB - 3)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def table(examples: list[dict[str, Any]], name: str) -> Any:
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    return Dataset(InMemoryTable(pyarrow.Table.from_pylist(examples)), fingerprint=name)


def preferences() -> Any:
    """Prompts, each with a better and a worse answer, drawn by number."""
    made = torch.Generator().manual_seed(0)

    def text(words: int) -> str:
        return "".join(f" w{int(i)}" for i in torch.randint(VOCAB - 3, (words,), generator=made))

    return table([{"prompt": text(4), "chosen": text(5), "rejected": text(5)} for _ in range(4 * STEPS)], "preferences")


def trained(trainer: Any) -> list[tuple[float, float]]:
    trainer.train()
    return [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]


def reference() -> Any:
    """Another model than the one that trains."""
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def dpo(folder: str) -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer

    from fxshard.integrations.transformers import sharded

    found: dict[str, Any] = {}
    for name, cls in (("fxshard", sharded(DPOTrainer, fullgraph=False, lowering="eager")), ("plain", DPOTrainer)):
        with launched():
            args = DPOConfig(str(Path(folder, name)), **SETTINGS)
            data, words = preferences(), tokenizer()
            trainer = cls(model=llama(), ref_model=reference(), args=args, train_dataset=data, processing_class=words)
            found[name] = trained(trainer)
            if name == "fxshard":
                found["held"] = [model.bytes_at_rest() for model in (trainer.model, trainer.ref_model)]
    found["bytes"] = sum(parameter.nbytes for parameter in llama().parameters())
    return found


@pytest.mark.timeout(300)
def test_dpo_with_two_sharded_models(ranks: Pool, tmp_path: Path) -> None:
    for found in ranks(2, dpo, str(tmp_path)):
        assert len(found["fxshard"]) == STEPS == len({loss for loss, _ in found["fxshard"]})
        for mine, peer in zip(found["fxshard"], found["plain"], strict=True):
            assert mine == pytest.approx(peer, rel=1e-4)
        policy, frozen = found["held"]
        assert frozen["param"] < 0.6 * found["bytes"], "a rank holds half of the reference"
        assert frozen["grad"] == 0 and frozen["param"] == policy["param"]


def dpo_with_adapters(folder: str) -> dict[str, Any]:
    """The reference is the model with its adapters disabled."""
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    from fxshard.integrations.transformers import sharded

    found: dict[str, Any] = {}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    for name, cls in (("fxshard", sharded(DPOTrainer, fullgraph=False, lowering="eager")), ("plain", DPOTrainer)):
        with launched():
            args = DPOConfig(str(Path(folder, name)), **SETTINGS | {"max_steps": 2})
            model, data, words = llama(), preferences(), tokenizer()
            torch.manual_seed(0)
            found[name] = trained(
                cls(model=model, args=args, train_dataset=data, processing_class=words, peft_config=lora)
            )
    return found


@pytest.mark.timeout(300)
def test_dpo_with_adapters_and_no_reference(ranks: Pool, tmp_path: Path) -> None:
    for found in ranks(2, dpo_with_adapters, str(tmp_path)):
        assert len(found["fxshard"]) == 2
        for mine, peer in zip(found["fxshard"], found["plain"], strict=True):
            assert mine == pytest.approx(peer, rel=1e-4)


def sft(folder: str) -> dict[str, Any]:
    from trl import SFTConfig, SFTTrainer

    from fxshard.integrations.transformers import sharded

    found: dict[str, Any] = {}
    examples = [{"input_ids": row["input_ids"].tolist()} for row in rows(4 * STEPS)]
    for name, cls in (("fxshard", sharded(SFTTrainer, fullgraph=False, lowering="eager")), ("plain", SFTTrainer)):
        with launched():
            args = SFTConfig(str(Path(folder, name)), packing=True, max_length=24, **SETTINGS)
            trainer = cls(model=llama(), args=args, train_dataset=table(examples, "rows"), processing_class=tokenizer())
            found[name] = trained(trainer)
    return found


@pytest.mark.timeout(300)
def test_sft_with_packing(ranks: Pool, tmp_path: Path) -> None:
    for found in ranks(2, sft, str(tmp_path)):
        assert len(found["fxshard"]) == STEPS == len({loss for loss, _ in found["fxshard"]})
        for mine, peer in zip(found["fxshard"], found["plain"], strict=True):
            assert mine == pytest.approx(peer, rel=1e-4)
