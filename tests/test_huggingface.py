"""Models from ``transformers``, unmodified: the losses are those of FSDP2."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.frontend.report import Compilations
from fxshard.schedule.events import Kind, Phase
from tests.hugging_face import SMALL, llama
from tests.pool import Pool
from tests.thorough import thorough

pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def make(kind: str) -> nn.Module:
    """A small random model; nothing is downloaded."""
    import transformers as hf

    torch.manual_seed(0)
    if kind == "llama":
        return llama()
    if kind == "checkpointed":
        model = llama()
        model.gradient_checkpointing_enable()
        return model
    if kind == "gpt2 with dropout and cache":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes))
    if kind == "gemma3, resized":
        sizes = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
        model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SMALL | sizes | {"num_hidden_layers": 2}))
        model.resize_token_embeddings(80)  # tied, as Gemma's are
        return model
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, **EXPERTS))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SMALL, **experts))


TOKENS = torch.arange(32).view(2, 16)
LAYERS = {"gpt2 with dropout and cache": "transformer.h"}


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, *, padded: bool = False) -> list[float]:
    found = []
    torch.manual_seed(dist.get_rank())  # for dropout
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(3, 64, (2, 12), generator=generator)
        mask = (torch.arange(12) < torch.tensor([[12], [7 + step]])).long()
        labels = tokens.masked_fill(mask == 0, -100) if padded else tokens
        given = {"attention_mask": mask} if padded else {}
        loss = model(input_ids=tokens, labels=labels, **given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def of_fsdp2(kind: str, *, padded: bool = False) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    peer = make(kind)
    for layer in peer.get_submodule(LAYERS.get(kind, "model.layers")).children():
        fully_shard(layer)
    fully_shard(peer)
    return losses(peer, torch.optim.AdamW(peer.parameters(), lr=1e-2), padded=padded)


def both(kind: str, options: dict[str, Any], *, padded: bool = False) -> tuple[list[float], list[float], list[str]]:
    model = fxshard.compile(make(kind), lowering="eager", **options)
    mine = losses(model, torch.optim.AdamW(model.parameters(), lr=1e-2), padded=padded)
    return mine, of_fsdp2(kind, padded=padded), model.report.unused_parameters


@pytest.mark.shows("E3", "H5")
@pytest.mark.parametrize("kind", ["gpt2 with dropout and cache", thorough("gemma3, resized"), thorough("llama")])
def test_dense_models_train_like_fsdp2(ranks: Pool, kind: str) -> None:
    """On batches with padding, in one graph, although GPT-2 logs a warning on its way to the loss.

    Gemma has windows, and embeddings that are tied.
    """
    for mine, peer, unused in ranks(2, both, kind, {}, padded=True, timeout=350):
        assert mine == pytest.approx(peer, rel=1e-6)
        assert not unused


def checkpointed() -> tuple[list[float], list[float], Counter[str]]:
    model = fxshard.compile(
        make("checkpointed"), lowering="eager", units=["model.layers.*"], debug=fxshard.Debug(keep_resident=False)
    )
    mine = losses(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    gathers = model.schedule.of(Kind.UNSHARD, phase=Phase.BACKWARD)
    return mine, of_fsdp2("checkpointed"), Counter(event.bucket for _, event in gathers)


@pytest.mark.shows("H8", "E3")
def test_gradient_checkpointing_trains_like_fsdp2(ranks: Pool) -> None:
    for mine, peer, gathers in ranks(2, checkpointed, timeout=350):
        assert mine == pytest.approx(peer, rel=1e-6)
        assert set(gathers.values()) == {1}
        assert "model.layers.0" in gathers


@pytest.mark.shows("E3")
@pytest.mark.parametrize("kind", [thorough("mixtral"), thorough("qwen3-moe")])
def test_expert_models_train_like_fsdp2(ranks: Pool, kind: str) -> None:
    """Routing depends on data, so on the CPU the graph breaks; the experts run between graphs."""
    for mine, peer, _ in ranks(2, both, kind, {"fullgraph": False}, timeout=350):
        assert mine == pytest.approx(peer, rel=1e-5)


def compilations(layers: int) -> Compilations:
    model = fxshard.compile(llama(num_hidden_layers=layers, use_cache=True), lowering="eager")
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert not model.report.attention.masked, "a mask that the model makes is recognised"
    assert model.report.compilations.captures == 1
    return model.report.compilations


@pytest.mark.thorough
@pytest.mark.shows("A4")
@pytest.mark.parametrize("layers", [7, 9])
def test_compilations_do_not_grow_with_depth(layers: int) -> None:
    """As in ``test_repetition``, with ``use_cache`` left at its default, which is for generation."""
    fewer, more = compilations(5), compilations(layers)
    assert (fewer.layers_folded, more.layers_folded) == (0, layers - 5)
    assert more.segments > fewer.segments and more.compiled == fewer.compiled


def test_a_loss_needs_no_key_value_cache() -> None:
    """In the run and in its plan, unless it is asked for. What generates one token after another gets it, as ever."""
    plain, inputs = llama(num_hidden_layers=1, use_cache=True), {"input_ids": TOKENS, "labels": TOKENS}
    keys = plain(input_ids=TOKENS).past_key_values.layers[0].keys.detach()
    planned = fxshard.plan(plain, inputs, world_size=1, hardware="cpu", lowering="eager")
    model = fxshard.compile(plain, lowering="eager")
    assert model(**inputs).past_key_values is None
    assert planned == model.schedule and planned.peak_bytes == model.schedule.peak_bytes
    asked = model(**inputs, use_cache=True).past_key_values
    torch.testing.assert_close(asked.layers[0].keys.detach(), keys)
    with torch.no_grad():
        given = model.eval()(input_ids=TOKENS).past_key_values
        assert torch.equal(given.layers[0].keys, asked.layers[0].keys)
        assert model(**inputs).past_key_values is None


def test_a_cache_that_only_the_model_inside_knows_is_not_made_either() -> None:
    """As in vision-language models; ``forward`` takes ``use_cache`` among keyword arguments that it does not name."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = GraniteMoeConfig(**{**SMALL, "use_cache": True}, **tokens, num_local_experts=2, num_experts_per_tok=1)
    plain, inputs = GraniteMoeForCausalLM(config), {"input_ids": TOKENS, "labels": TOKENS}
    expected = plain(**inputs)
    found = fxshard.compile(plain, lowering="eager")(**inputs)
    assert expected.past_key_values is not None and found.past_key_values is None
    assert found.loss.item() == expected.loss.item()


def test_a_mask_of_ones_is_no_mask_unless_there_are_positions() -> None:
    """With positions that start anew and no mask, documents would be kept apart; with a mask they are not."""
    plain, ones = llama(num_hidden_layers=1), torch.ones_like(TOKENS)
    positions = (torch.arange(TOKENS.shape[1]) % 3).expand_as(TOKENS)
    model = fxshard.compile(copy.deepcopy(plain), lowering="eager")
    for given in ({"attention_mask": ones}, {"attention_mask": ones, "position_ids": positions}):
        mine, theirs = (m(input_ids=TOKENS, labels=TOKENS, **given).loss.item() for m in (model, plain))
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert model.report.shapes[0] == f"input_ids {list(TOKENS.shape)} (training)"
    assert "attention_mask" in model.report.shapes[1] and "position_ids" in model.report.shapes[1]
    apart = plain(input_ids=TOKENS, labels=TOKENS, position_ids=positions, use_cache=False).loss.item()
    assert apart != pytest.approx(theirs, rel=1e-4)


PROBLEMS = {
    "single_label_classification": (3, torch.tensor([0, 2])),
    "regression": (1, torch.tensor([0.5, -0.5])),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_classifier_is_one_graph_from_its_first_step(problem: str) -> None:
    """Its kind of problem is written to its config by the first forward, and read by all."""
    import transformers as hf

    kinds, labels = PROBLEMS[problem]
    config = hf.LlamaConfig(**SMALL | {"num_hidden_layers": 1, "pad_token_id": 0, "num_labels": kinds})
    plain = hf.LlamaForSequenceClassification(config)
    model = fxshard.compile(copy.deepcopy(plain), lowering="eager")
    for _ in range(2):
        loss = model(input_ids=TOKENS, labels=labels).loss
        loss.backward()
    torch.testing.assert_close(loss, plain(input_ids=TOKENS, labels=labels).loss)
    assert model.report.compilations.captures == 1
    assert model.config.problem_type == plain.config.problem_type == problem


@pytest.mark.parametrize("labels", [thorough([0, 2]), [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]], ids=str)
def test_a_classifier_with_a_rule_of_its_own_keeps_it(labels: list[Any]) -> None:
    """DeBERTa takes labels of two dimensions for probabilities, where nothing is configured."""
    import transformers as hf

    sizes = {name: SMALL[name] for name in SMALL if name != "num_key_value_heads"}
    plain = hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**sizes, num_labels=3)).eval()
    model = fxshard.compile(copy.deepcopy(plain), lowering="eager")
    given = {"input_ids": TOKENS, "labels": torch.tensor(labels)}
    torch.testing.assert_close(model(**given).loss, plain(**given).loss)


@pytest.mark.parametrize("configured", [False, thorough(True)])
def test_outputs_of_layers_are_collected_in_one_graph(configured: bool) -> None:
    """By hooks that the model registers before the capture; asked for in a call, or by the configuration."""
    given = {} if configured else {"output_hidden_states": True}
    plain, model = (llama(num_hidden_layers=2, output_hidden_states=configured) for _ in range(2))
    if configured:
        model = torch.compile(fxshard.shard(model, lowering="eager"), backend="fxshard", fullgraph=True)
    else:
        model = fxshard.compile(model, lowering="eager")
        assert model(input_ids=TOKENS, labels=TOKENS).hidden_states is None
    mine, theirs = (m(input_ids=TOKENS, labels=TOKENS, **given) for m in (model, plain))
    assert len(mine.hidden_states) == len(theirs.hidden_states) == 3
    for state, expected in zip(mine.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(state, expected)
    (mine.loss + mine.hidden_states[1].square().mean()).backward()
    (theirs.loss + theirs.hidden_states[1].square().mean()).backward()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(model.get_parameter(name).grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize("kind", ["mixtral", "t5"])
def test_checkpointed_layers_that_do_more_than_compute(kind: str) -> None:
    """Mixtral: the loss that balances experts reads what hooks inside of such layers append to a list. T5: attention
    sets ``requires_grad`` of zeros, for embeddings that are frozen."""
    import transformers as hf

    torch.manual_seed(0)
    if kind == "mixtral":
        config = hf.MixtralConfig(**SMALL | {"num_hidden_layers": 2}, num_local_experts=4, output_router_logits=True)
        plain = hf.MixtralForCausalLM(config).train()
    else:
        sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
        plain = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0)).train()
        plain.shared.requires_grad_(False)
    model = fxshard.compile(copy.deepcopy(plain), lowering="eager")
    results = []
    for m in (model, plain):
        m.gradient_checkpointing_enable()
        results.append(m(input_ids=TOKENS, labels=TOKENS))
        results[-1].loss.backward()
    mine, theirs = results
    if kind == "mixtral":
        assert mine.aux_loss.item() == pytest.approx(theirs.aux_loss.item(), rel=1e-6) and mine.aux_loss > 0
    assert model.report.compilations.captures == 1
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.thorough
def test_a_loss_of_adapters_needs_no_key_value_cache() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    adapted = peft.get_peft_model(
        llama(num_hidden_layers=1, use_cache=True), peft.LoraConfig(target_modules=["q_proj"])
    )
    model = fxshard.compile(adapted, lowering="eager")
    assert model(input_ids=TOKENS, labels=TOKENS).past_key_values is None
