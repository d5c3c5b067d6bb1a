"""What loads libraries on a GPU does so for whoever trains: forward and backward, and nobody notices."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from fxshard import first_product


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_runs_with_its_gradients(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a gradient that is not deterministic would be an error, or a warning."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    given = torch.ones(1, 1, 8, 4, dtype=torch.bfloat16)
    with (
        warnings.catch_warnings(action="error"),
        mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as attention,
    ):
        first_product.attend(given)
    (query, *_), _ = attention.call_args
    assert (query.grad is None) is deterministic
    assert given.grad is None and not given.requires_grad


def test_each_width_of_heads_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: mock.MagicMock())
    with mock.patch.object(first_product, "attend") as attend, mock.patch.object(torch, "mm") as mm:
        first_product.load_libraries(torch.device("cpu"), torch.float32)
    assert [call.args[0].shape for call in attend.call_args_list] == [(1, 1, 128, 64), (1, 1, 128, 128)]
    assert mm.call_count == 1
