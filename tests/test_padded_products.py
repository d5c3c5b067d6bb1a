"""Sizes that Inductor pads: vocabularies like 50257 and 30522, or 32000 and a token for padding.

It multiplies operands that are padded and cuts the padding off, so the result lies in memory in another way than the
values in the graph said. On a GPU it does that where it is faster; here it is asked to.
"""

from __future__ import annotations

import copy
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm

import fxshard
from fxshard.passes.context import PassContext

TOKENS = torch.arange(32).view(2, 16)


class Model(nn.Module):
    """The logits are returned, read by the loss and saved for backward; eight does not divide their number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(70, 32)
        self.head = nn.Linear(32, 70)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embedding(tokens).tanh())
        return logits, F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_products_of_padded_operands() -> None:
    found: list[bool] = []

    def look(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
        found.append(any("constant_pad" in str(node.target) for node in module.graph.nodes))
        return module

    plain = Model()
    passes = fxshard.PASSES.after("gather_gradients", look)
    model = fxshard.compile(copy.deepcopy(plain), units=["embedding", "head"], passes=passes)
    asked = config.patch(force_shape_pad=True)
    on_a_gpu = mock.patch.object(pad_mm, "check_device", lambda *_: True)
    with asked, on_a_gpu, mock.patch.object(pad_mm, "has_triton", lambda: True):
        logits, loss = model(TOKENS)
        loss.backward()
    expected_logits, expected = plain(TOKENS)
    expected.backward()
    assert found == [True]
    assert logits.stride() == expected_logits.stride()
    torch.testing.assert_close((logits, loss), (expected_logits, expected))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
