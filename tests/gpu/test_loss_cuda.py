"""The chunked loss on a GPU: the Triton kernel gives what torch gives, and no logits are in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.kernels.loss_op import chunked_loss

pytestmark = pytest.mark.gpu
IGNORED = -100


def given(tokens: int, width: int, classes: int, dtype: torch.dtype, bias: bool) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    sizes = [(tokens, width), (classes, width), *([(classes,)] if bias else [])]
    leaves = [torch.randn(size, device="cuda").to(dtype).requires_grad_() for size in sizes]
    labels = torch.randint(classes, (tokens,), device="cuda")
    labels[::7] = IGNORED
    return leaves, labels


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.shows("H4")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "classes"), [(300, 1000), (257, 4099), (130, 9001)])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True])
def test_as_accurate_as_full_logits(
    dtype: torch.dtype, tokens: int, classes: int, cap: float | None, bias: bool
) -> None:
    leaves, labels = given(tokens, 64, classes, dtype, bias)

    def full(leaves: list[Tensor], wide: torch.dtype) -> list[Tensor]:
        logits = F.linear(*leaves).to(wide)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = F.cross_entropy(logits, labels)
        return [loss.detach(), *torch.autograd.grad(loss * 3, leaves)]

    caps = (1.0, False, 1.0) if cap is None else (1 / cap, True, cap)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    loss = chunked_loss(*leaves[:2], leaves[2] if bias else None, labels, wide, IGNORED, True, caps, 128)
    mine = [loss.detach(), *torch.autograd.grad(loss * 3, leaves)]
    plain = full(leaves, wide)
    exact = full([leaf.detach().double().requires_grad_() for leaf in leaves], torch.float64)
    for found, theirs, exactly in zip(mine, plain, exact, strict=True):
        assert found.dtype == theirs.dtype
        assert error(found, exactly) <= 1.2 * error(theirs, exactly) + 1e-5


@pytest.mark.shows("H4")
def test_all_ignored_and_not_finite() -> None:
    leaves, labels = given(300, 64, 1000, torch.bfloat16, bias=False)
    caps = (1.0, False, 1.0)
    nothing = chunked_loss(*leaves, None, torch.full_like(labels, IGNORED), torch.float32, IGNORED, True, caps, 128)
    assert nothing.isnan() and not any(grad.any() for grad in torch.autograd.grad(nothing, leaves))
    with torch.no_grad():
        leaves[0][5, 3] = torch.nan
    assert chunked_loss(*leaves, None, labels, torch.float32, IGNORED, True, caps, 128).isnan()


@pytest.mark.shows("H4")
def test_a_step_holds_no_logits() -> None:
    """Of 8192 tokens and 65536 classes logits take 1 GiB in bf16, and plain PyTorch has them several times."""
    config = LlamaConfig(vocab=65536, dim=256, layers=2, heads=4, hidden=512)
    precision = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)
    tokens = torch.randint(65536, (2, 4096), device="cuda")
    peaks, losses = {}, {}
    for chunked in (False, True):
        torch.manual_seed(0)
        debug = fxshard.Debug(chunk_loss=chunked)
        adamw = fxshard.AdamW(lr=1e-3)
        model = fxshard.compile(Llama(config).cuda(), precision=precision, optimizer=adamw, debug=debug)
        losses[chunked] = []
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            loss = model(tokens, tokens)
            loss.backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
            losses[chunked].append(float(loss.detach()))
            peaks[chunked] = torch.cuda.max_memory_allocated()
        assert len(model.report.loss.chunked) == chunked
        del model, loss
    assert losses[True] == pytest.approx(losses[False], rel=2e-3)
    assert peaks[True] < peaks[False] - 2**30
