"""Train a small random Llama from ``transformers`` with ZeRO-3: no download, about a minute on two CPU processes.

    torchrun --standalone --nproc-per-node 2 examples/huggingface.py

What to look at: the model is used as it is, ``model(input_ids=..., labels=...).loss``; the loss falls; ``generate``
continues the sequence that was learnt, and ``save_pretrained`` writes what ``from_pretrained`` reads. The last line
says over how many ranks and in how many buckets the model was sharded. Any causal language model with ``labels`` works
the same way, and weights of a published one are read by each rank for itself; see docs/howto/huggingface.md.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

import fxshard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--save", metavar="FOLDER", help="where to write the trained model")
    parser.add_argument("--lowering", default="inductor", choices=["inductor", "eager"])
    options = parser.parse_args()

    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise SystemExit("this example needs transformers: pip install -c constraints.txt -e '.[hf]'") from None

    rank = int(os.environ.get("RANK", "0"))
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    # Only the loss is used: with a large vocabulary, its logits are never made.
    adamw, lowering = fxshard.AdamW(lr=3e-3), options.lowering
    model = fxshard.compile(LlamaForCausalLM(config), optimizer=adamw, return_logits=False, lowering=lowering)

    generator = torch.Generator().manual_seed(rank)
    pattern = torch.randint(256, (64,), generator=torch.Generator().manual_seed(0))
    for step in range(options.steps):
        starts = torch.randint(64, (8, 1), generator=generator)
        tokens = pattern[(starts + torch.arange(48)) % 64]  # pieces of one sequence: there is something to learn
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        if rank == 0 and (step % 5 == 0 or step == options.steps - 1):
            print(f"step {step:3d}  loss {loss.item():.4f}")
    model.eval()
    continued = model.generate(
        pattern[None, :16], max_new_tokens=16, do_sample=False, eos_token_id=None
    )  # on every rank
    if options.save:
        model.save_pretrained(options.save)
    if rank == 0:
        right = (continued[0, 16:] == pattern[16:32]).sum().item()
        print(f"generate: {right} of 16 tokens are those of the sequence")
        print(str(model.schedule).splitlines()[0])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
