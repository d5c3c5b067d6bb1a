"""Several documents in one row, told apart by ``position_ids``: each attends to itself alone."""

from __future__ import annotations

import pytest
import torch

import fxshard

pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")


def llama(attention: str) -> torch.nn.Module:
    """A small random model; nothing is downloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def packed(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One row; the first token of a document is no label of the one before."""
    labels = [torch.cat([torch.tensor([-100]), document[1:]]) for document in documents]
    return {
        "input_ids": torch.cat(documents)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(document)) for document in documents])[None],
    }


@pytest.mark.shows("H3")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_in_a_row_train_as_documents_apart(attention: str) -> None:
    generator = torch.Generator().manual_seed(1)
    model, plain = fxshard.compile(llama(attention), lowering="eager"), llama(attention)
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
