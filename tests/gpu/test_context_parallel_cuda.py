"""Attention to keys before the queries on CUDA: FlashAttention with the causal mask at the lower right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxshard._torch.private.attention import lower_right_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("length", "keys"), [(128, 128), (128, 384), (64, 1024)])
def test_equals_attention_with_a_mask(length: int, keys: int, captured: bool) -> None:
    """Also as Inductor compiles it. Results and gradients, against fp32 with the mask written out."""
    torch.manual_seed(0)
    query = torch.randn(2, 8, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key, value = (
        torch.randn(2, 2, keys, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
    )
    upstream = torch.randn_like(query)
    attend = torch.compile(lower_right_attention, fullgraph=True) if captured else lower_right_attention
    found = attend(query, key, value, None, True)
    mine = torch.autograd.grad(found, (query, key, value), upstream)
    seen = torch.ones(length, keys, dtype=torch.bool, device="cuda").tril(keys - length)
    wide = [tensor.detach().float().requires_grad_() for tensor in (query, key, value)]
    wanted = F.scaled_dot_product_attention(*wide, attn_mask=seen, enable_gqa=True)
    theirs = torch.autograd.grad(wanted, wide, upstream.float())
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.float() - b).norm() < 2e-2 * b.norm()
