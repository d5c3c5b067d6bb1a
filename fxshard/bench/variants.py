"""More models of ``transformers`` than ``--model hf:...`` has: with the sizes of our Llama but for one thing, large
ones, and two with adapters.

fxshard bench train --device cuda --no-cache --model fxshard.bench.variants:packed --contenders fsdp2-compile,fxshard
fxshard bench train --device cuda --no-cache --model fxshard.bench.variants:llama_8b --contenders fxshard-8bit
fxshard bench train --device cuda --no-cache --model fxshard.bench.variants:qlora_8b --contenders fxshard-no-logits
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxshard import quantize_frozen
from fxshard.bench import hugging_face
from fxshard.bench.workloads import SIZES, Inputs, with_padding

DOCUMENTS = 16
"""In a packed row."""
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def large_vocabulary() -> tuple[nn.Module, Inputs]:
    """A Llama with 128,256 tokens, those of Llama 3: logits take as much memory as everything else."""
    return _built("llama", vocab_size=128256)


def window() -> tuple[nn.Module, Inputs]:
    """A Mistral whose queries see a quarter of a sequence."""
    return _built("mistral", sliding_window=SIZES["1b"].length // 4)


def packed() -> tuple[nn.Module, Inputs]:
    """A Llama with sixteen documents in a row, told apart by ``position_ids``."""
    model, inputs = _built("llama")
    batch, length = inputs["input_ids"].shape
    positions = torch.arange(length // DOCUMENTS).repeat(DOCUMENTS)
    return model, {**inputs, "position_ids": positions.expand(batch, length).contiguous()}


def full_mask() -> tuple[nn.Module, Inputs]:
    """A Llama that is given a mask with its batch, as every tokenizer makes one. No row is padded."""
    model, inputs = _built("llama")
    return model, {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}


def padded() -> tuple[nn.Module, Inputs]:
    """A Llama whose rows are padded to the longest: the shortest of four has half of its tokens."""
    model, inputs = _built("llama")
    return model, with_padding(inputs, 0.5)


def llama_8b() -> tuple[nn.Module, Inputs]:
    """The shapes of Llama 3 8B, two sequences of 4096."""
    return _built("llama", batch=2, **LLAMA_8B)


def llama_8b_layers() -> tuple[nn.Module, Inputs]:
    """Eight of its 32 layers and a quarter of its vocabulary: its products, in the memory of a small model."""
    return _built("llama", **{**LLAMA_8B, "num_hidden_layers": 8, "vocab_size": 32000})


def moe_16b() -> tuple[nn.Module, Inputs]:
    """A Qwen3-MoE of 28 layers with 64 experts in each, six of them for a token: 16 B parameters, one sequence."""
    sizes = {"num_hidden_layers": 28, "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
    return _built("qwen3-moe", batch=1, **sizes)


def lora_8b() -> tuple[nn.Module, Inputs]:
    """A LoRA fine-tune: rank 16 on all linears of ``llama_8b`` in bf16."""
    model, inputs = _built("llama", batch=2, dtype=torch.bfloat16, **LLAMA_8B)
    return adapted(model), inputs


def qlora_8b() -> tuple[nn.Module, Inputs]:
    """The same with base weights at rest in NF4; for contenders of fxshard, FSDP2 would cast the codes."""
    model, inputs = lora_8b()
    return quantize_frozen(model, "nf4"), inputs


def adapted(model: nn.Module) -> nn.Module:
    """A model with adapters on all linears of its layers, and nothing else to train."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, target_modules=ADAPTED, task_type="CAUSAL_LM")
    return get_peft_model(model, config)  # type: ignore[arg-type, no-any-return]


def _built(kind: str, batch: int | None = None, **different: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    size = SIZES["1b"]
    model = hugging_face.build(kind, size.config, size.length, **different)
    tokens = torch.randint(different.get("vocab_size", size.config.vocab), (batch or size.batch, size.length))
    return model, {"input_ids": tokens, "labels": tokens}
