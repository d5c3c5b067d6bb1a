"""Heads of keys and values that were repeated for a mask are passed as they are."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.passes.masked import DIM, Rewritten, check_close, check_equal, lower, qkv, repeat_kv

REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat_kv": repeat_kv,
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "torch.repeat_interleave": lambda x: torch.repeat_interleave(x, 2, -3),
    "unsqueeze": lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2),
}


@pytest.mark.shows("H1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", REPEATED)
def test_repeated_heads_are_passed_as_they_are(form: str, dtype: torch.dtype) -> None:
    repeat = REPEATED[form]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=lower())

    found = Rewritten(attend, *qkv(kv=2, dtype=dtype))
    assert found.report.causal[0].grouped
    assert [node.op for node in found.after.graph.nodes] == [*["placeholder"] * 3, "call_function", "output"]
    check_close(found, 1e-6 if dtype is torch.float32 else 1e-2)


def _changed_in_between(x: Tensor) -> Tensor:
    x = x * 1
    repeated = repeat_kv(x)
    x.mul_(2)
    return repeated


def _without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return repeat_kv(x)


NOT_REPEATED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "in another order": (lambda x: x.repeat(1, 2, 1, 1), repeat_kv),
    "expanded in another order": (lambda x: x[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2), repeat_kv),
    "values only": (lambda x: torch.cat([x, x], 1), repeat_kv),
    "along the sequence": (lambda x: repeat_kv(x).flip(2), repeat_kv),
    "an index": (lambda x: repeat_kv(x[:, [1, 0]][:, :, None, ::1].squeeze(2)) * 2, repeat_kv),
    "changed in between": (_changed_in_between, repeat_kv),
    "changed after": (lambda x: repeat_kv(x).mul_(2), repeat_kv),
    "without gradients": (_without_gradients, repeat_kv),
    "values narrower": (repeat_kv, lambda x: repeat_kv(x[..., :2])),
}


@pytest.mark.shows("H2")
@pytest.mark.parametrize("form", NOT_REPEATED)
def test_other_heads_are_left_alone(form: str) -> None:
    keys, values = NOT_REPEATED[form]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, keys(k), values(v), attn_mask=lower())[..., :2] + k.sum() * 0

    found = Rewritten(attend, *qkv(kv=2))
    assert len(found.report.causal) == 1 and not found.report.causal[0].grouped
    check_equal(found)


@pytest.mark.parametrize("why", ["heads too wide", "dropout", "a choice of kernels"])
def test_heads_that_kernels_do_not_take_are_repeated(why: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout = 0.5 if why == "dropout" else 0.0
        if why != "a choice of kernels":
            return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), lower(), dropout)
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), lower())

    found = Rewritten(attend, *qkv(kv=2, dim=264 if why == "heads too wide" else DIM))
    assert not found.report.causal[0].grouped
    assert any(node.target is operator.getitem for node in found.after.graph.nodes)
