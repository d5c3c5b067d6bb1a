"""A model of ``transformers`` that is captured in a third of the time that a Llama takes; nothing is downloaded."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tests.hugging_face import SMALL


class TinyConfig(PreTrainedConfig):
    model_type = "tiny"
    vocab_size, hidden_size = SMALL["vocab_size"], SMALL["hidden_size"]


class TinyLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.v_proj(torch.tanh(self.q_proj(x)))


class Tiny(PreTrainedModel):
    """Embeddings, a layer and a head, which predict each token from the one before."""

    config_class = TinyConfig
    _no_split_modules = ["TinyLayer"]

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([TinyLayer(config.hidden_size)])
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> CausalLMOutput:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def tiny(**config: Any) -> Tiny:
    """The same values in every process; ``config`` says what is different."""
    torch.manual_seed(0)
    return Tiny(TinyConfig(**config))
