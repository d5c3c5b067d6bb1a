"""Small models of ``transformers`` with random weights, the same in every process; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def llama(**config: Any) -> nn.Module:
    """A Llama of one layer; ``config`` says what is different."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL | config))
