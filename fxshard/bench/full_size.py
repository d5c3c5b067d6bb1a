"""Other architectures of ``transformers`` in sizes that people train, with random weights and dropout as configured.

fxshard bench train --device cuda --no-cache --model fxshard.bench.full_size:bert --contenders fsdp2-compile,fxshard
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxshard.bench.target import transformers
from fxshard.bench.workloads import Inputs, with_padding

Made = tuple[nn.Module, Inputs]


def gpt2() -> Made:
    """GPT-2 medium, 16 × 1024 tokens."""
    model = _model("GPT2LMHeadModel", n_embd=1024, n_layer=24, n_head=16)
    return model, _text(model, 16, 1024)


def bert() -> Made:
    """BERT large, 32 × 512 tokens."""
    model = _model(
        "BertForMaskedLM", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
    )
    return model, _text(model, 32, 512)


def modernbert() -> Made:
    """ModernBERT large, 16 × 1024 tokens: windows and attention to everything take turns."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16}
    model = _model("ModernBertForMaskedLM", **sizes)
    return model, _text(model, 16, 1024)


def modernbert_padded() -> Made:
    """The same with rows padded to the longest, as batches mostly are: the shortest has a quarter of its tokens."""
    model, _ = modernbert()
    return model, with_padding(_text(model, 16, 1024), 0.25)


def deberta() -> Made:
    """DeBERTa v3 large, 16 × 512 tokens."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256}
    shared = {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}
    model = _model("DebertaV2ForMaskedLM", vocab_size=128100, type_vocab_size=0, **sizes, **relative, **shared)
    return model, _text(model, 16, 512)


def t5() -> Made:
    """T5 v1.1 large, 16 × 512 tokens to as many."""
    sizes = {"d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 16}
    kind = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
    model = _model("T5ForConditionalGeneration", **kind, **sizes)
    return model, _text(model, 16, 512)


def vit() -> Made:
    """ViT large, 128 images of 224 × 224."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    return _model("ViTForImageClassification", num_labels=1000, **sizes), _images(128)


def dinov2() -> Made:
    """DINOv2 large, 128 images of 224 × 224."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14}
    return _model("Dinov2ForImageClassification", num_labels=1000, image_size=224, **sizes), _images(128)


def _model(name: str, **sizes: Any) -> nn.Module:
    kind = getattr(transformers(), name)
    model: nn.Module = kind(kind.config_class(**sizes))
    return model.train()


def _text(model: nn.Module, sequences: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(4, model.config.vocab_size, (sequences, length))  # type: ignore[union-attr, arg-type]
    return {"input_ids": tokens, "labels": tokens}


def _images(count: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(count, 3, 224, 224), "labels": torch.randint(1000, (count,))}
