"""Models of ``transformers`` with random weights, in the sizes of our own. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxshard.bench.models import LlamaConfig
from fxshard.bench.target import transformers

CONFIGS = {
    "llama": "LlamaConfig",
    "qwen3": "Qwen3Config",
    "gemma3": "Gemma3TextConfig",
    "mistral": "MistralConfig",
    "qwen3-moe": "Qwen3MoeConfig",
}
"""By kind: the class of its configuration."""


def build(kind: str, size: LlamaConfig, length: int, dtype: torch.dtype = torch.float32, **different: Any) -> nn.Module:
    """A causal language model of that size, but for what is ``different``; otherwise as its configuration has it by
    default."""
    config = getattr(transformers(), CONFIGS[kind])(**{**_shapes(kind, size, length), **different})
    model: nn.Module = transformers().AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()


def _shapes(kind: str, size: LlamaConfig, length: int) -> dict[str, Any]:
    """The arguments of that kind's configuration for a model of that size."""
    shapes = {
        "vocab_size": size.vocab,
        "hidden_size": size.dim,
        "intermediate_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads or size.heads,
        "head_dim": size.dim // size.heads,
        "max_position_embeddings": length,
    }
    if size.experts:
        shapes |= {"num_experts": size.experts, "num_experts_per_tok": size.chosen}
        shapes |= {"moe_intermediate_size": size.hidden}
    if kind == "gemma3":
        # Its head is its embedding, so wider MLPs make up for the number of parameters.
        shapes |= {"intermediate_size": size.hidden * 10 // 9 // 64 * 64, "sliding_window": length // 8}
    return shapes
