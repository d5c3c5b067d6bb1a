"""Models of ``transformers`` that differ from those of ``--model hf:...`` in one thing, in the sizes of our Llama.

fxshard bench train --device cuda --no-cache --model fxshard.bench.variants:packed --contenders fsdp2-compile,fxshard
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxshard.bench import hugging_face
from fxshard.bench.workloads import SIZES, Inputs

DOCUMENTS = 16
"""In a packed row."""


def large_vocabulary() -> tuple[nn.Module, Inputs]:
    """A Llama with 128,256 tokens, those of Llama 3: logits take as much memory as everything else."""
    return _built("LlamaConfig", vocab_size=128256)


def window() -> tuple[nn.Module, Inputs]:
    """A Mistral whose queries see a quarter of a sequence."""
    return _built("MistralConfig", sliding_window=SIZES["1b"].length // 4)


def packed() -> tuple[nn.Module, Inputs]:
    """A Llama with sixteen documents in a row, told apart by ``position_ids``."""
    model, inputs = _built("LlamaConfig")
    batch, length = inputs["input_ids"].shape
    positions = torch.arange(length // DOCUMENTS).repeat(DOCUMENTS)
    return model, {**inputs, "position_ids": positions.expand(batch, length).contiguous()}


def _built(kind: str, **different: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    size = SIZES["1b"]
    shapes = {**hugging_face.shapes("llama", size.config, size.length), **different}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**shapes)).train()
    tokens = torch.randint(shapes["vocab_size"], (size.batch, size.length))
    return model, {"input_ids": tokens, "labels": tokens}
