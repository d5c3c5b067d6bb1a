"""torchrun --standalone --nproc-per-node 2 examples/trainer.py: ``transformers.Trainer`` with fxshard.

What to look at: two lines differ from a Trainer without it. The folder ``final`` is a model of ``transformers``."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fxshard.integrations.transformers import sharded  # the first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lowering", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", default="build/trainer")
    options = parser.parse_args()

    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=176, use_cache=False)
    config.num_hidden_layers = options.layers
    config.num_attention_heads = config.num_key_value_heads = 4
    generator = torch.Generator().manual_seed(0)
    rows = [torch.arange(32).add(int(torch.randint(224, (), generator=generator))) for _ in range(256)]
    data = [{"input_ids": row, "labels": row} for row in rows]

    args = TrainingArguments(
        options.out, max_steps=options.steps, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=5,
        use_cpu=not torch.cuda.is_available(), report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer_class = sharded(Trainer, zero=3, lowering=options.lowering)  # and the second
    trainer = trainer_class(model=LlamaForCausalLM(config), args=args, train_dataset=data, eval_dataset=data[:16])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{options.out}/final")
    if trainer.is_world_process_zero():
        print(f"loss after {options.steps} steps: {loss:.3f}; {trainer.model.report.compilations}")


if __name__ == "__main__":
    main()
