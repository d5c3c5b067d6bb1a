"""``fxshard::chunked_cross_entropy``: loss and gradients are those of plain PyTorch, however tokens are divided."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxshard.kernels.loss_op import chunked_cross_entropy, chunked_loss

IGNORED = 4
Results = tuple[Tensor, list[Tensor]]


def leaves(tokens: int, width: int, classes: int, dtype: torch.dtype, bias: bool, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(tokens, width), (classes, width), *([(classes,)] if bias else [])]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def plain(given: list[Tensor], labels: Tensor, cap: float | None, *, mean: bool, dtype: torch.dtype) -> Results:
    """The loss in full, computed in ``dtype`` from the product on."""
    logits = F.linear(*given).to(dtype)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="mean" if mean else "sum")
    return loss.detach(), list(torch.autograd.grad(loss * 0.3, given))


def chunked(given: list[Tensor], labels: Tensor, cap: float | None, rows: int, *, mean: bool) -> Results:
    hidden, weight, *bias = given
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    caps = (1.0, False, 1.0) if cap is None else (1 / cap, True, cap)
    loss = chunked_loss(hidden, weight, bias[0] if bias else None, labels, dtype, IGNORED, mean, caps, rows)
    return loss.detach(), list(torch.autograd.grad(loss * 0.3, given))


def distance(found: Tensor, expected: Tensor) -> float:
    size = float(expected.double().norm())
    return float((found.double() - expected.double()).norm()) / (size or 1.0)


@pytest.mark.shows("H4")
@settings(max_examples=60)
@given(
    tokens=st.integers(1, 23),
    rows=st.integers(1, 24),
    classes=st.integers(5, 19),
    width=st.integers(1, 6),
    ignored=st.sampled_from([0.0, 0.4, 0.9]),
    cap=st.sampled_from([None, 0.7, 30.0]),
    mean=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_equals_full_logits(
    tokens: int,
    rows: int,
    classes: int,
    width: int,
    ignored: float,
    cap: float | None,
    mean: bool,
    bias: bool,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    labels = torch.randint(classes, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORED
    labels[0] = 0  # one counts
    given = leaves(tokens, width, classes, dtype, bias)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    loss, grads = chunked(given, labels, cap, rows, mean=mean)
    expected, theirs = plain(given, labels, cap, mean=mean, dtype=wide)
    tolerance = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    assert loss.dtype == expected.dtype
    assert distance(loss, expected) < min(tolerance, 1e-5)
    for mine, their in zip(grads, theirs, strict=True):
        assert mine.dtype == their.dtype and mine.shape == their.shape
        assert distance(mine, their) < tolerance


@pytest.mark.shows("H4")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_chunks_are_as_accurate_as_one_product(dtype: torch.dtype) -> None:
    """Against float64: gradients of the weight are sums over 64 chunks, and lose nothing by that."""
    given = leaves(512, 16, 24, dtype, bias=True)
    labels = torch.arange(512) % 24
    exact = [leaf.detach().double().requires_grad_() for leaf in given]
    loss, truth = plain(exact, labels, None, mean=True, dtype=torch.float64)
    full_loss, full = plain(given, labels, None, mean=True, dtype=torch.float32)
    my_loss, mine = chunked(given, labels, None, 8, mean=True)
    assert distance(my_loss, loss) <= 1.1 * distance(full_loss, loss) + 1e-7
    for found, theirs, exactly in zip(mine, full, truth, strict=True):
        assert distance(found, exactly) <= 1.1 * distance(theirs, exactly) + 1e-7


@pytest.mark.shows("H4")
def test_all_labels_ignored() -> None:
    """The mean of nothing is NaN and its gradients are 0, as torch has it; the sum is 0."""
    given, labels = leaves(6, 3, 7, torch.float32, bias=True), torch.full((6,), IGNORED)
    for mean in (True, False):
        loss, grads = chunked(given, labels, None, 2, mean=mean)
        expected, theirs = plain(given, labels, None, mean=mean, dtype=torch.float32)
        assert torch.equal(loss.isnan(), expected.isnan()) and loss.isnan() == mean
        assert all(torch.equal(mine, their) for mine, their in zip(grads, theirs, strict=True))


def test_no_tokens() -> None:
    given = leaves(0, 3, 7, torch.float32, bias=True)
    loss, grads = chunked(given, torch.empty(0, dtype=torch.int64), None, 2, mean=True)
    expected, theirs = plain(given, torch.empty(0, dtype=torch.int64), None, mean=True, dtype=torch.float32)
    assert loss.isnan() and expected.isnan()
    assert all(torch.equal(mine, their) for mine, their in zip(grads, theirs, strict=True))


def test_values_that_are_not_finite_show() -> None:
    given, labels = leaves(6, 3, 7, torch.float32, bias=False), torch.arange(6)
    with torch.no_grad():
        given[0][2, 1] = torch.nan
    loss, grads = chunked(given, labels, None, 2, mean=True)
    assert loss.isnan() and grads[1].isnan().any()


@pytest.mark.shows("H4")
@pytest.mark.parametrize("label", [7, -1])
def test_labels_that_are_no_classes_are_refused(label: int) -> None:
    given = leaves(6, 3, 7, torch.float32, bias=False)
    with pytest.raises((RuntimeError, IndexError), match=r"out of (bounds|range)"):
        chunked(given, torch.tensor([0, 1, label, 2, 3, 0]), None, 2, mean=True)


def test_small_factors_in_half_precision() -> None:
    """A mean over many tokens in float16, without a factor on the loss: gradients do not vanish before they are due."""
    given = leaves(4096, 4, 8, torch.float16, bias=False)
    labels = torch.arange(4096) % 8
    _, grads = chunked(given, labels, None, 512, mean=True)
    exact = [leaf.detach().double().requires_grad_() for leaf in given]
    _, truth = plain(exact, labels, None, mean=True, dtype=torch.float64)
    assert distance(grads[1], truth[1]) < 2e-3


def test_only_what_is_needed_is_computed() -> None:
    hidden, weight = leaves(6, 3, 7, torch.float32, bias=False)
    options = (IGNORED, True, 1.0, False, 1.0, 4)
    for of_hidden in (False, True):
        for of_weight in (False, True):
            _, _, *grads = chunked_cross_entropy(
                hidden.detach(), weight.detach(), None, torch.arange(6), *options, of_hidden, of_weight
            )
            assert [grad.numel() for grad in grads] == [18 * of_hidden, 21 * of_weight, 0]
    frozen = chunked_loss(
        hidden, weight.detach(), None, torch.arange(6), torch.float32, *options[:2], (1.0, False, 1.0), 4
    )
    (grad,) = torch.autograd.grad(frozen, hidden)
    (expected,) = torch.autograd.grad(
        F.cross_entropy(hidden @ weight.detach().t(), torch.arange(6), ignore_index=4), hidden
    )
    torch.testing.assert_close(grad, expected)


def test_the_operator_is_well_formed() -> None:
    hidden, weight, bias = leaves(6, 3, 7, torch.float32, bias=True)
    args = (hidden, weight, bias, torch.arange(6), IGNORED, True, 0.5, True, 2.0, 4, True, True)
    torch.library.opcheck(chunked_cross_entropy, args)
