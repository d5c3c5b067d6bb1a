"""``transformers.Trainer`` over padded batches, as people fine-tune: what the plain Trainer logs, in one graph for
training and one for evaluation, whatever the lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.thorough import thorough

pytest.importorskip("accelerate", reason="needs Accelerate: pip install accelerate")
pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")

VOCAB, BATCH = 96, 4
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0, "dropout_rate": 0.0}
MARKS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


def made(name: str, **sizes: Any) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    kind = getattr(hf, name)
    model: nn.Module = kind(kind.config_class(num_hidden_layers=2, **{**SIZES, **QUIET, **sizes}))
    return model


Row = dict[str, Any]
TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[list[int]], Any]]] = {
    "classification": (lambda: made("BertForSequenceClassification", num_labels=3), lambda tokens: tokens[0] % 3),
    "windows of an encoder": (
        lambda: made("ModernBertForSequenceClassification", num_labels=2, local_attention=8, **MARKS),
        lambda tokens: tokens[0] % 2,
    ),
    "causal language model": (lambda: made("LlamaForCausalLM"), lambda tokens: tokens),
    "sequence to sequence": (
        lambda: made("T5ForConditionalGeneration", d_model=32, d_ff=48, d_kv=8, num_layers=2, decoder_start_token_id=0),
        lambda tokens: tokens[: len(tokens) // 2 + 1],
    ),
}


def rows(count: int, label: Callable[[list[int]], Any]) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        length = int(torch.randint(5, 40, (), generator=generator))
        tokens = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        found.append({"input_ids": tokens, "labels": label(tokens)})
    return found


def padded(batch: list[Row]) -> dict[str, torch.Tensor]:
    """As the collators of ``transformers`` do: each batch to its own longest row."""

    def joined(values: list[Any], fill: int) -> torch.Tensor:
        if isinstance(values[0], int):
            return torch.tensor(values)
        longest = max(map(len, values))
        return torch.tensor([value + [fill] * (longest - len(value)) for value in values])

    tokens, labels = ([row[name] for row in batch] for name in ("input_ids", "labels"))
    mask = [[1] * len(row) for row in tokens]
    return {"input_ids": joined(tokens, 0), "attention_mask": joined(mask, 0), "labels": joined(labels, -100)}


def trained(folder: Path, task: str, own: bool) -> Any:
    from transformers import Trainer, TrainingArguments

    from fxshard.integrations.transformers import sharded

    make, label = TASKS[task]
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    cls = sharded(Trainer, lowering="eager") if own else Trainer
    data, held_out = rows(BATCH * 4 + 2, label), rows(BATCH + 2, label)
    trainer = cls(model=make(), args=args, train_dataset=data, eval_dataset=held_out, data_collator=padded)
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


@pytest.mark.parametrize(
    "task", ["windows of an encoder", *(thorough(name) for name in TASKS if "windows" not in name)]
)
def test_padded_batches_train_as_without_fxshard(task: str, tmp_path: Path) -> None:
    mine, plain = (trained(tmp_path / str(own), task, own) for own in (True, False))
    assert losses(mine) == pytest.approx(losses(plain), rel=1e-5)
    assert mine.model.report.compilations.captures == 2, mine.model.report.shapes
