"""Several documents in one row, told apart by ``position_ids``: each attends to itself alone."""

from __future__ import annotations

import random

import pytest
import torch

import fxshard
from tests.hugging_face import llama
from tests.thorough import thorough
from tests.training import EPS, step_both

pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")


def drawn(row: int, total: int) -> list[torch.Tensor]:
    """Documents of random lengths that fill a row."""
    lengths, generator = random.Random(row), torch.Generator().manual_seed(row)
    documents: list[torch.Tensor] = []
    while (left := total - sum(map(len, documents))) > 0:
        documents.append(torch.randint(64, (min(left, lengths.randint(1, 20)),), generator=generator))
    return documents


def packed(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One row; the first token of a document is no label of the one before."""
    labels = [torch.cat([torch.tensor([-100]), document[1:]]) for document in documents]
    return {
        "input_ids": torch.cat(documents)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(document)) for document in documents])[None],
    }


@pytest.mark.shows("H3")
@pytest.mark.parametrize(("attention", "windows"), [thorough("sdpa", None), ("sdpa", True), thorough("eager", None)])
def test_documents_in_a_row_train_as_documents_apart(attention: str, windows: bool | None) -> None:
    generator = torch.Generator().manual_seed(1)
    debug = fxshard.Debug(window_attention=windows)
    chosen = {"attn_implementation": attention, "use_cache": True}  # which is the default, and would join documents
    model, plain = fxshard.compile(llama(**chosen), lowering="eager", debug=debug), llama(**chosen)
    for lengths in ((5, 7, 4), (9, 3, 4), (16,)):
        documents = [torch.randint(64, (length,), generator=generator) for length in lengths]
        plain.zero_grad()
        labels = sum(length - 1 for length in lengths)
        apart = [plain(input_ids=row[None], labels=row[None]).loss * (len(row) - 1) / labels for row in documents]
        sum(apart).backward()
        model.zero_grad()
        loss = model(**packed(documents)).loss
        loss.backward()
        assert loss.item() == pytest.approx(sum(part.item() for part in apart), rel=1e-6)
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert model.report.compilations.captures == 1, "where documents begin is data"
    assert not model.report.attention.causal
    assert len(model.report.attention.windows) == (1 if windows else 0)


BATCHES, LENGTH = 50, 32


def fine_tuned(last: int) -> tuple[float, int]:
    """Fifty batches as TRL's collator makes them of packed rows; the last row is only as long as what was left.

    The largest relative difference of a loss from plain PyTorch's, and how many graphs were captured.
    """
    model = fxshard.compile(llama(), optimizer=fxshard.AdamW(lr=1e-3, eps=EPS), lowering="eager")
    plain, worst = llama(), 0.0
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=EPS, fused=True)
    for step in range(BATCHES):
        batch = packed(drawn(step, LENGTH if step < BATCHES - 1 else last))
        loss, expected = step_both(model, plain, optimizer, **batch)
        worst = max(worst, abs(loss.item() / expected.item() - 1))
    return worst, model.report.compilations.captures


@pytest.mark.shows("I4")
def test_fifty_packed_batches_compile_at_most_twice() -> None:
    """``test_lengths`` has ranks whose lengths differ."""
    worst, captures = fine_tuned(17)
    assert worst < 1e-5
    assert captures <= 2
