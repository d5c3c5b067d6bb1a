"""Attention to windows and documents on a GPU: the Triton kernels give what torch gives with a mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxshard.kernels.window_op import document_bounds, visible, window_attention

pytestmark = pytest.mark.gpu


def packed_bounds(batch: int, length: int, mean: int) -> Tensor:
    torch.manual_seed(1)
    return document_bounds((torch.rand(batch, length, device="cuda") < 1 / mean).cumsum(-1))


def padded(where: str, length: int) -> Tensor:
    """Two rows: a mask of keys with more padding in the first than in the second."""
    torch.manual_seed(2)
    at, ends = torch.arange(length, device="cuda"), torch.tensor([[length // 2], [length - 1]], device="cuda")
    anywhere = torch.rand(2, length, device="cuda") < 0.7
    anywhere[:, 0] = True
    found = {"right": at < ends, "left": at >= length - ends, "anywhere": anywhere}[where]
    return found[:, None, None, :]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.shows("H3")
@pytest.mark.parametrize(
    ("dtype", "width", "heads", "kv", "length", "window", "documents", "padding"),
    [
        (torch.bfloat16, 128, 4, 4, 512, (512, 0), None, None),
        (torch.bfloat16, 128, 6, 2, 700, (100, 0), None, None),
        (torch.bfloat16, 128, 6, 2, 1000, (2000, 0), 60, None),
        (torch.float16, 64, 4, 4, 515, (33, 0), 200, None),
        (torch.float16, 64, 4, 1, 96, (1000, 0), 5, None),
        (torch.bfloat16, 256, 4, 2, 515, (100, 0), 60, None),
        (torch.bfloat16, 16, 4, 2, 64, (1, 0), None, None),
        (torch.bfloat16, 128, 6, 2, 1000, (2000, 0), None, "right"),
        (torch.bfloat16, 128, 4, 4, 700, (100, 0), None, "left"),
        (torch.float16, 64, 4, 1, 515, (1000, 0), 60, "anywhere"),
        (torch.bfloat16, 256, 4, 2, 515, (100, 0), None, "left"),
        (torch.bfloat16, 96, 4, 2, 700, (100, 0), None, None),
        (torch.float16, 80, 4, 4, 515, (1000, 0), 60, None),
        (torch.bfloat16, 160, 2, 1, 300, (1000, 0), None, "right"),
        (torch.bfloat16, 64, 4, 4, 1000, (65, 64), None, None),
        (torch.bfloat16, 64, 4, 4, 515, (65, 64), None, "right"),
        (torch.bfloat16, 128, 6, 2, 700, (1000, 1000), None, "anywhere"),
        (torch.float16, 64, 4, 1, 515, (33, 200), 60, None),
        (torch.bfloat16, 256, 2, 2, 300, (1, 7), None, "left"),
    ],
)
def test_as_accurate_as_with_a_mask(
    dtype: torch.dtype,
    width: int,
    heads: int,
    kv: int,
    length: int,
    window: tuple[int, int],
    documents: int | None,
    padding: str | None,
) -> None:
    torch.manual_seed(0)
    sizes = [(2, length, n, width) for n in (heads, kv, kv)]
    leaves = [torch.randn(size, device="cuda").to(dtype).transpose(1, 2).requires_grad_() for size in sizes]
    grad = torch.randn(2, heads, length, width, device="cuda").to(dtype)
    bounds = packed_bounds(2, length, documents) if documents else None
    key_mask = padded(padding, length) if padding else None
    mask = visible(length, *window, bounds, torch.device("cuda"), key_mask)

    def masked(leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
        query, key, value = leaves
        key, value = (each.repeat_interleave(heads // kv, dim=1) for each in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.2)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    out = window_attention(*leaves, bounds, key_mask, *window, 0.2)
    mine = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    theirs = masked(leaves, grad)
    exact = masked([leaf.detach().double().requires_grad_() for leaf in leaves], grad.double())
    for found, plain, exactly in zip(mine, theirs, exact, strict=True):
        assert found.dtype == plain.dtype
        assert error(found, exactly) <= 1.2 * error(plain, exactly) + 1e-4
    hidden = ~mask.any(-1).expand(2, heads, length)
    assert not out[hidden].any() and (padding != "left" or hidden.any())
