"""Batches of changing length: few graphs, on ranks whose lengths differ, with plain PyTorch's losses."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard._torch import private
from fxshard.frontend.report import Report
from tests.hugging_face import llama
from tests.pool import Pool
from tests.thorough import thorough
from tests.toy import Llama
from tests.training import EPS

VOCAB = 96
BATCHES = 8
MOST_GRAPHS = 6


def toy() -> nn.Module:
    torch.manual_seed(0)
    return Llama(vocab=VOCAB, layers=1, dim=16, heads=2, hidden=24)


def hugging_face() -> nn.Module:
    return llama(vocab_size=VOCAB, max_position_embeddings=1024)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "config"):
        return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
    return model(tokens[:, :-1], tokens[:, 1:])


def batch(length: int, size: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (size, length), generator=torch.Generator().manual_seed(length))


def lengths_of(rank: int) -> list[int]:
    """Between 10 and 100; rank 1 meets the first change three steps after rank 0 does."""
    drawn = random.Random(rank)
    same = 3 * rank
    return [20] * same + [drawn.randint(10, 100) for _ in range(BATCHES - same)]


def trained(kind: str, **options: Any) -> tuple[float, Report, list[list[str]]]:
    """How far a loss was from plain PyTorch's on the same batches, and what was compiled and sent."""
    make = toy if kind == "toy" else hugging_face
    model = fxshard.compile(make(), optimizer=fxshard.AdamW(lr=1e-3, eps=EPS), **options)
    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=EPS, fused=True)
    worst = 0.0
    for length in lengths_of(dist.get_rank()):
        tokens = batch(length)
        loss, expected = loss_of(model, tokens), loss_of(plain, tokens)
        loss.backward()
        expected.backward()
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        for each in (model.optimizer, optimizer):
            each.step()
            each.zero_grad()
        worst = max(worst, abs(loss.item() / expected.item() - 1))
    return worst, model.report, [schedule.communication() for schedule in model.emitted]


@pytest.mark.parametrize("kind", ["toy", thorough("hugging face")])
@pytest.mark.parametrize("lowering", ["eager", thorough("inductor")])
def test_batches_of_random_lengths_that_differ_between_ranks(ranks: Pool, kind: str, lowering: str) -> None:
    if kind == "hugging face":
        pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")
    for worst, report, communication in ranks(2, trained, kind, lowering=lowering, timeout=400):
        assert worst < 1e-5
        assert report.compilations.captures == len(report.shapes) <= MOST_GRAPHS
        assert "any" not in report.shapes[0] and "any] (training)" in report.shapes[-1]
        assert all(lines == communication[0] for lines in communication), "ranks that compile alone find no one waiting"


def trained_with_masks(lengths: list[int], padded: list[bool]) -> tuple[float, Report, list[list[str]]]:
    """As ``trained``, in batches of two rows with masks, some of which hide the end of a row."""
    debug = fxshard.Debug(window_attention=True)
    model, plain = fxshard.compile(hugging_face(), lowering="eager", debug=debug), hugging_face()
    worst = 0.0
    for length, short in zip(lengths, padded, strict=True):
        tokens = batch(length, 2)
        mask = torch.ones_like(tokens)
        mask[1, length // 2 :] = 1 - short
        labels = tokens.masked_fill(mask == 0, -100)
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        expected = plain(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        model.zero_grad()
        worst = max(worst, abs(loss.item() / expected.item() - 1))
    return worst, model.report, [schedule.communication() for schedule in model.emitted]


MASKED = {
    "full": ([[False] * 4, [False] * 4], [0, 0], [2, 2]),
    "full at first": ([[False, True, False, True], [False] * 4], [0, 0], [4, 2]),
    "padded at first": ([[True, False, True, False], [True] * 4], [1, 1], [1, 1]),
    "padded on one rank": ([[False] * 4, [True, True, False, False]], [0, 1], [2, 1]),
}
"""By step, on each of two ranks: whether a row is padded; graphs with a mask first; how many graphs at most."""


@pytest.mark.parametrize("kind", ["full at first", thorough("full"), thorough("padded at first"), "padded on one rank"])
def test_masks_that_hide_nothing_are_left_out(ranks: Pool, kind: str) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")
    padded, with_mask, graphs = MASKED[kind]
    given = [([20, 31, 44, 17], each) for each in padded]
    found = ranks(2, on_its_rank, given, timeout=400)
    for (worst, report, communication), masks, rows, most in zip(found, with_mask, padded, graphs, strict=True):
        assert worst < 1e-5
        assert ("attention_mask" in report.shapes[0]) == bool(masks)
        assert report.compilations.captures <= most
        assert all(lines == found[0][2][0] for lines in communication)
        assert ("padding, without a mask" if any(rows) else "causal, without a mask") in str(report)


def on_its_rank(given: list[Any]) -> tuple[float, Report, list[list[str]]]:
    return trained_with_masks(*given[dist.get_rank()])


class Normed(nn.Module):
    """With a number that is part of the model, and one that is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.RMSNorm(8, eps=1e-2), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (self.head(self.norm(x)) * scale).square().mean()


def test_sizes_are_open_from_the_start_if_asked_for() -> None:
    model, plain = fxshard.compile(Normed(), dynamic=True, lowering="eager"), Normed()
    for size, length in ((2, 7), (3, 12), (5, 4)):
        x = torch.randn(size, length, 8)
        loss = model(x)
        loss.backward()
        assert loss.item() == pytest.approx(plain(x).item(), rel=1e-6)
    assert model.report.compilations.captures == len(model.emitted) == 1
    assert model.report.shapes == ("0 [any, any, 8] (training)",)
    assert "graph 1 takes 0 [any, any, 8] (training)" in str(model.report)


def test_layers_are_folded_and_masks_recognised_where_sizes_are_open_from_the_start() -> None:
    pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")
    make = partial(llama, vocab_size=VOCAB, num_hidden_layers=8)
    model, plain = fxshard.compile(make(), dynamic=True, lowering="eager"), make()
    for size, length in ((2, 7), (3, 12)):
        tokens = batch(length, size)
        assert model(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(
            plain(input_ids=tokens, labels=tokens).loss.item(), rel=1e-6
        )
    assert model.report.compilations.captures == 1 and model.report.compilations.layers_folded == 3
    assert len(model.report.attention.causal) == 8 and not model.report.attention.masked


def test_backward_of_folded_layers_is_given_every_size_of_what_is_saved() -> None:
    """Labels have sizes of their own, which nothing in backward reads, though it takes tensors of such sizes."""
    pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")
    model = fxshard.compile(llama(vocab_size=VOCAB, num_hidden_layers=8), dynamic=True, lowering="eager")
    tokens = batch(7, 2)
    model(input_ids=tokens, labels=tokens.clone()).loss.backward()
    assert model.report.compilations.layers_folded == 3
    values = [node.meta["val"] for node in model.graphs["backward"].graph.find_nodes(op="placeholder")]
    given = {str(value) for value in values if isinstance(value, torch.SymInt)}
    assert {str(symbol) for value in values for symbol in private.free_symbols(value)} <= given


def test_numbers_that_change_are_left_open_too() -> None:
    model, plain, x = fxshard.compile(Normed(), lowering="eager"), Normed(), torch.randn(2, 8)
    for scale in (1.0, 2.5, 3.5, 7.0):
        loss = model(x, scale)
        loss.backward()
        assert loss.item() == pytest.approx(plain(x, scale).item(), rel=1e-6)
    assert model.report.compilations.captures == 2


class Broken(nn.Module):
    """Two layers that each break: Dynamo captures the parts of the first, and calls them for the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.one(x, *layer)
        return x.square().mean()

    def one(self, x: torch.Tensor, before: nn.Module, after: nn.Module) -> torch.Tensor:
        hidden = torch.tanh(before(x))
        torch._dynamo.graph_break()
        return x + after(hidden)


@pytest.mark.parametrize("lowering", ["eager", thorough("inductor")])
def test_parts_between_graph_breaks_take_every_length(lowering: str) -> None:
    model, plain = fxshard.compile(Broken(), fullgraph=False, lowering=lowering), Broken()
    programs = []
    for length in (5, 6, 7, 3, 11):
        x = torch.randn(length, 8)
        for each in (model, plain):
            each.zero_grad()
            each(x).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        programs.append(len(model.emitted))
    assert programs[0] < programs[1] == programs[-1]


def test_a_graph_for_every_length_ends_in_an_error_that_lists_them() -> None:
    model = fxshard.compile(nn.Linear(4, 4), dynamic=False, lowering="eager")
    with torch.no_grad(), pytest.raises(fxshard.CaptureError) as caught:
        for length in range(2, 20):
            model(torch.ones(length, 4))
    said = str(caught.value)
    assert "compiled 8 times" in said and "graph 8 takes 0 [9, 4] (evaluation)" in said and "dynamic=None" in said
