"""chunk_loss: a head and its loss become one operator without logits, and nothing else is taken for that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fxshard.kernels.loss_op import chunked_loss
from fxshard.passes.chunk_loss import chunk_loss
from fxshard.passes.context import PassContext
from fxshard.passes.options import Debug, Options
from fxshard.schedule.events import Phase

BATCH, LENGTH, DIM, VOCAB = 2, 6, 8, 11
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


class Rewritten:
    """A captured function of hidden states, weight, bias and labels before and after the pass."""

    def __init__(self, run: Loss, dtype: torch.dtype = torch.float32, *, force: bool | None = True, **options: Any):
        context = PassContext((), Options(debug=Debug(chunk_loss=force), **options), Phase.FORWARD)
        self.report = context.loss
        generator = torch.Generator().manual_seed(0)
        sizes = ((BATCH, LENGTH, DIM), (VOCAB, DIM), (VOCAB,))
        leaves = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]
        labels = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
        labels[0, 2:4] = -100

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            self.before = copy.deepcopy(module)
            self.after = chunk_loss(module, context)
            self.inputs = list(inputs)
            return self.before.forward

        torch._dynamo.reset()
        torch.compile(run, backend=backend, fullgraph=True, dynamic=False)(*leaves, labels)

    def check_no_logits(self) -> None:
        """No value has the classes as a dimension, except the weight and the bias."""
        for node in self.after.graph.nodes:
            value = node.meta.get("example_value")
            sizes = set(value.shape) if isinstance(value, Tensor) else set()
            assert VOCAB not in sizes or sizes <= {VOCAB, DIM}, node

    def check_close(self, tolerance: float) -> None:
        expected, found = (_results(module, self.inputs) for module in (self.before, self.after))
        assert found[0].dtype == expected[0].dtype
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).norm() <= tolerance * theirs.norm()


def _results(module: fx.GraphModule, inputs: list[Any]) -> list[Tensor]:
    (output, *_) = module(*inputs)
    leaves = [each for each in inputs if each.requires_grad]
    return [output.detach().double(), *(g.double() for g in torch.autograd.grad(output * 0.7, leaves))]


def rows(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), **options)


# -- what is recognised ----------------------------------------------------------------------------------------------


def shifted(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w).float()
    return rows(logits[..., :-1, :].contiguous(), y[..., 1:].contiguous())


def padded(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w).float()
    y = F.pad(y, (0, 1), value=-100)
    return rows(logits, y[..., 1:].contiguous(), reduction="sum", ignore_index=-100) / 7


def capped(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w)
    logits = torch.tanh(logits / 1.5) * 1.5
    return rows(logits.float(), y)


RECOGNISED: dict[str, Loss] = {
    "linear": lambda h, w, b, y: F.cross_entropy(F.linear(h, w).flatten(0, 1), y.flatten()),
    "linear, 2 dimensions": lambda h, w, b, y: F.cross_entropy(F.linear(h.view(-1, DIM), w, b), y.view(-1)),
    "bias": lambda h, w, b, y: rows(F.linear(h, w, b), y),
    "bias added": lambda h, w, b, y: rows(h @ w.t() + b, y),
    "matmul": lambda h, w, b, y: rows(torch.matmul(h, w.T).float(), y),
    "matmul with [in, classes]": lambda h, w, b, y: rows(h @ (w * 1.0).t().contiguous(), y),
    "shifted by slices": shifted,
    "shifted by padding": padded,
    "soft cap": capped,
    "scale": lambda h, w, b, y: rows(F.linear(h, w, b) * 0.5, y),
    "scale, soft cap with other numbers": lambda h, w, b, y: rows(2 * torch.tanh(0.5 * F.linear(h, w) / 3), y),
    "classes in the middle": lambda h, w, b, y: F.cross_entropy(F.linear(h, w).transpose(1, 2), y),
    "sum": lambda h, w, b, y: rows(F.linear(h, w), y, reduction="sum"),
    "another label is ignored": lambda h, w, b, y: rows(F.linear(h, w), y.clamp_min(3), ignore_index=3),
    "last tokens": lambda h, w, b, y: rows(F.linear(h, w)[:, -3:].reshape(-1, VOCAB), y[:, -3:].contiguous()),
    "one token": lambda h, w, b, y: F.cross_entropy(F.linear(h, w)[:, -1, :], y[:, 0]),
    "all labels ignored but one": lambda h, w, b, y: rows(F.linear(h, w), y.where(y == y[1, 1], -100)),
}


@pytest.mark.shows("H4")
@pytest.mark.parametrize("style", RECOGNISED)
def test_loss_and_gradients_are_those_of_full_logits(style: str) -> None:
    found = Rewritten(RECOGNISED[style])
    assert len(found.report.chunked) == 1 and not found.report.full
    found.check_no_logits()
    found.check_close(2e-6)


@pytest.mark.shows("H4")
@pytest.mark.parametrize("style", ["linear", "shifted by padding", "soft cap", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(style: str, dtype: torch.dtype) -> None:
    """With a cast to float32 or without; not from float64, which holds more."""
    found = Rewritten(RECOGNISED[style], dtype)
    if dtype == torch.float64 and style in ("shifted by padding", "soft cap"):
        assert "is not computed in torch.float64" in found.report.full[0].reason
        return
    assert len(found.report.chunked) == 1
    found.check_no_logits()
    found.check_close(2e-2 if dtype == torch.bfloat16 else 1e-14)


def test_without_gradients_none_are_computed() -> None:
    def run(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return rows(F.linear(h, w), y)

    found = Rewritten(run)
    assert len(found.report.chunked) == 1
    with FlopCounterMode(display=False) as counter:
        found.after(*found.inputs)
    assert counter.get_total_flops() == 2 * BATCH * LENGTH * DIM * VOCAB, "one product"


def test_a_size_that_varies() -> None:
    found: list[Any] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        context = PassContext((), Options(debug=Debug(chunk_loss=True)), Phase.FORWARD)
        found.append(context.loss)
        return chunk_loss(module, context).forward

    w = nn.Parameter(torch.randn(VOCAB, DIM))
    run = torch.compile(lambda h, y: shifted(h, w, w, y), backend=backend, dynamic=True)
    for length in (5, 9):
        h, y = torch.randn(2, length, DIM, requires_grad=True), torch.randint(VOCAB, (2, length))
        torch.testing.assert_close(run(h, y), shifted(h, w, w, y))
    assert len(found) == 1 and len(found[0].chunked) == 1


# -- what is left alone ----------------------------------------------------------------------------------------------


def counted(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(h, w)
    return rows(logits, y), (logits.argmax(-1) == y).sum()


def z_loss(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w).float()
    return rows(logits, y) + 1e-4 * logits.logsumexp(-1).square().mean()


def in_place(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w)
    logits.div_(2)
    return rows(logits, y)


def weight_changed(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    w = w.detach().clone()
    logits = F.linear(h, w)
    w.zero_()
    return rows(logits, y)


def switched(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        logits = F.linear(h, w)
    return rows(logits * 1.0, y) + h.sum() + w.sum() + b.sum()


def autocast(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return rows(F.linear(h, w), y)


def softened(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).view(-1, VOCAB), F.one_hot(y.clamp_min(0), VOCAB).view(-1, VOCAB).float())


def fewer_classes(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w)[..., :9].flatten(0, 1), y.flatten() % 9)


def listed(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w)[:, [0, 3]].flatten(0, 1), y[:, [0, 3]].flatten())


def one_class(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Of as many tokens as there are classes: the index takes a class, and tokens are last."""
    return F.cross_entropy(F.linear(h, w[:LENGTH])[:, :, 0, ...], y[:, 0].clamp_min(0) % LENGTH)


LEFT: dict[str, tuple[Loss, str]] = {
    "weights of classes": (lambda h, w, b, y: rows(F.linear(h, w), y, weight=b.detach().abs()), "weight="),
    "label smoothing": (lambda h, w, b, y: rows(F.linear(h, w), y, label_smoothing=0.1), "label_smoothing="),
    "no reduction": (lambda h, w, b, y: rows(F.linear(h, w), y, reduction="none").sum(), "reduction='none'"),
    "soft labels": (softened, "not classes"),
    "logits counted too": (counted, "read by argmax"),
    "z-loss": (z_loss, "read by logsumexp"),
    "two losses": (lambda h, w, b, y: rows(x := F.linear(h, w), y) + rows(x, y + 0), "read by"),
    "rounded": (lambda h, w, b, y: rows(F.linear(h, w).bfloat16(), y), "is not computed in torch.float32"),
    "computed in float64": (
        lambda h, w, b, y: rows(F.linear(h, w).to(torch.float64), y),
        "is not computed in torch.float32",
    ),
    "two caps": (lambda h, w, b, y: rows(F.linear(h, w).tanh().tanh(), y), "two tanh"),
    "cap of a bias": (lambda h, w, b, y: rows(F.linear(h, w).tanh() + b, y), "scaled, cast or have a bias"),
    "another bias": (lambda h, w, b, y: rows(F.linear(h, w, b) + b, y), "scaled, cast or have a bias"),
    "bias after a cast": (lambda h, w, b, y: rows(F.linear(h.bfloat16(), w.bfloat16()).float() + b, y), "scaled, cast"),
    "bias of another type": (lambda h, w, b, y: rows(F.linear(h, w) + b.bfloat16(), y), "differ in type"),
    "bias per token": (lambda h, w, b, y: rows(F.linear(h, w) + h[..., :1], y), "stands between"),
    "scaled by a tensor": (lambda h, w, b, y: rows(F.linear(h, w) * b[0], y), "stands between"),
    "another function": (lambda h, w, b, y: rows(F.linear(h, w).relu(), y), "stands between"),
    "fewer classes": (fewer_classes, "stands between"),
    "one class": (one_class, "stands between"),
    "classes reordered": (lambda h, w, b, y: rows(F.linear(h, w).flip(-1), y), "stands between"),
    "rows by a list": (listed, "stands between"),
    "tokens in another order": (
        lambda h, w, b, y: rows(F.linear(h, w).transpose(0, 1).contiguous(), y),
        "stands between",
    ),
    "changed in place": (in_place, "read by div_"),
    "weight changed in place": (weight_changed, "changed in place"),
    "gradients switched off": (switched, "switched"),
    "autocast": (autocast, "as under autocast"),
    "no product": (lambda h, w, b, y: F.cross_entropy(h.view(-1, DIM), y.view(-1) % DIM), "stands between"),
}


@pytest.mark.shows("H4")
@pytest.mark.parametrize("near_miss", LEFT)
def test_near_misses_are_left_alone(near_miss: str) -> None:
    run, reason = LEFT[near_miss]
    found = Rewritten(run)
    assert not found.report.chunked and found.report.full
    assert reason in str(found.report)
    assert [node.target for node in found.after.graph.nodes] == [node.target for node in found.before.graph.nodes]


def test_in_a_checkpointed_region() -> None:
    """It would run again in backward, gradients and all."""

    def run(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return checkpoint(lambda h: rows(F.linear(h, w), y), h, use_reentrant=False)

    found = Rewritten(run)
    assert not found.report.chunked and "checkpointed" in found.report.full[0].reason


# -- choices ---------------------------------------------------------------------------------------------------------


def both(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(h, w)
    return rows(logits.float(), y), logits


@pytest.mark.shows("H4")
def test_returned_logits_are_kept_unless_told_otherwise() -> None:
    kept = Rewritten(both)
    assert "return_logits=False" in kept.report.full[0].reason and not kept.report.chunked
    assert isinstance(kept.after(*kept.inputs)[1], Tensor)
    dropped = Rewritten(both, return_logits=False)
    assert len(dropped.report.chunked) == 1
    assert dropped.after(*dropped.inputs)[1] is None
    dropped.check_no_logits()
    dropped.check_close(2e-6)


def test_chunks_are_used_where_they_are_asked_for() -> None:
    assert len(Rewritten(both, force=None, return_logits=False).report.chunked) == 1
    found = Rewritten(RECOGNISED["linear"], force=None)
    assert "return_logits=False" in found.report.full[0].reason and not found.report.chunked
    off = Rewritten(RECOGNISED["linear"], force=False)
    assert "chunk_loss=False" in off.report.full[0].reason


def test_two_heads() -> None:
    found = Rewritten(lambda h, w, b, y: rows(F.linear(h, w), y) + rows(F.linear(h, w * 2, b), y, reduction="sum"))
    assert len(found.report.chunked) == 2
    assert [node.target for node in found.after.graph.nodes].count(chunked_loss) == 2
    found.check_close(2e-6)
