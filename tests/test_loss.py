"""Losses without logits in whole models: sharded, accumulated, tied, planned; and models of ``transformers``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxshard
from fxshard._torch.errors import ConfigError
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.schedule.events import Kind, Phase
from tests.pool import Pool
from tests.thorough import thorough
from tests.toy import batch
from tests.training import VOCAB, Run, full_gradients, plain_run, sharded_run, this_ranks_batch

CHUNKED = fxshard.Debug(chunk_loss=True)


class Language(nn.Module):
    """An embedding, a layer and a head, whose loss is shifted, capped and ignores some labels."""

    def __init__(self, tied: bool = False, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.head = nn.Linear(32, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        logits = torch.tanh(self.head(h) / 5.0) * 5.0
        return F.cross_entropy(logits[:, :-1].float().reshape(-1, VOCAB), y[:, :-1].flatten(), ignore_index=3)


class Tied(Language):
    def __init__(self) -> None:
        super().__init__(tied=True)


def check_no_logits(graphs: dict[str, fx.GraphModule], tokens: int, classes: int = VOCAB) -> None:
    """No value in the graphs is as large as the logits of a batch."""
    for graph in graphs.values():
        for node in graph.graph.nodes:
            values = node.meta.get("val")
            for value in values if isinstance(values, tuple | list) else [values]:
                sizes = list(value.shape) if isinstance(value, Tensor) else []
                assert not (classes in sizes and value.numel() >= tokens * classes), node


# -- sharded ---------------------------------------------------------------------------------------------------------

STEPS = 2


def stages(make: Any, zeros: list[int]) -> list[Run]:
    return [sharded_run(make, steps=STEPS, zero=zero, chunk_loss=True) for zero in zeros]


@pytest.mark.shows("H4")
@pytest.mark.parametrize(
    ("make", "zeros"), [(Language, [3]), (Tied, [1]), thorough(Language, [0, 1, 2]), thorough(Tied, [0, 2, 3])]
)
def test_two_ranks_train_like_plain_pytorch(ranks: Pool, make: Any, zeros: list[int]) -> None:
    expected = plain_run(2, make, steps=STEPS, fused=False, apart=True)
    for runs in ranks(2, stages, make, zeros):
        for run in runs:
            assert run.distance(expected) < 1e-6


def accumulated() -> dict[str, Tensor]:
    model = fxshard.compile(Language(), zero=3, lowering="eager", debug=CHUNKED)
    with model.no_sync():
        (this_ranks_loss(model, 0) / 2).backward()
    (this_ranks_loss(model, 1) / 2).backward()
    return full_gradients(model)


def this_ranks_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(*this_ranks_batch(step))
    return loss


@pytest.mark.shows("H4")
def test_accumulated_gradients(ranks: Pool) -> None:
    model = Language()
    for step in range(2):
        for rank in range(2):
            (model(*batch(step, 2, rank, VOCAB)) / 4).backward()
    for found in ranks(2, accumulated):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.shows("H4")
@pytest.mark.parametrize("make", [thorough(Language), thorough(Tied)])
def test_through_inductor_in_bf16(make: Any) -> None:
    """Gradients are as close to those in float32 as plain PyTorch's in bf16; no value is as large as logits."""
    x, y = batch(0, 1, 0, VOCAB)
    exact, plain = make(), make().bfloat16()
    exact(x, y).backward()
    plain(x, y).backward()
    model = fxshard.compile(make(), precision=fxshard.Precision(torch.bfloat16, torch.float32), debug=CHUNKED)
    model(x, y).backward()
    for name, parameter in model.named_parameters():
        expected, theirs = exact.get_parameter(name).grad, plain.get_parameter(name).grad
        assert (parameter.grad - expected).norm() <= 1.3 * (theirs - expected).norm(), name
    check_no_logits(model.graphs, x.numel() - len(x))
    assert len(model.report.loss.chunked) == 1 and "without" in str(model.report)


def test_gradients_of_the_head_are_written_into_their_bucket_unrounded() -> None:
    """As those of products are on a GPU: fp32 sums, which are scaled on the way."""
    precision = fxshard.Precision(torch.bfloat16, torch.float32)
    model = fxshard.compile(Language(), precision=precision, lowering="eager", debug=CHUNKED)
    model(*batch(0, 1, 0, VOCAB)).backward()
    written = [node for node in model.graphs["backward"].graph.nodes if node.name.startswith("scaled_into")]
    assert len(written) == 2, "weight and bias"
    grad = model.head.weight.grad
    assert not torch.equal(grad, grad.bfloat16().float())


def test_head_and_hidden_states_that_are_frozen() -> None:
    x, y = batch(0, 1, 0, VOCAB)
    for trained in ("head", "layers"):
        plain = Language()
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
        model = fxshard.compile(copy.deepcopy(plain), lowering="eager", debug=CHUNKED)
        plain(x, y).backward()
        model(x, y).backward()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert (parameter.grad is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(parameter.grad, expected)


def test_layers_are_folded_as_before() -> None:
    x, y = batch(0, 1, 0, VOCAB)
    plain = Language(layers=7)
    model = fxshard.compile(copy.deepcopy(plain), lowering="eager", debug=CHUNKED)
    loss = model(x, y)
    loss.backward()
    plain(x, y).backward()
    assert model.report.compilations.layers_folded == 2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def test_a_head_in_mxfp8_keeps_its_product() -> None:
    x, y = batch(0, 1, 0, VOCAB)
    for excluded, kept in (((), True), (("head",), False)):
        precision = fxshard.MXFP8(exclude=excluded)
        model = fxshard.compile(Language(), precision=precision, lowering="eager", debug=CHUNKED)
        model(x, y).backward()
        assert ("MXFP8" in str(model.report.loss)) == kept
        assert len(model.report.loss.chunked) == (not kept)


def test_evaluation_computes_no_gradients() -> None:
    x, y = batch(0, 1, 0, VOCAB)
    model = fxshard.compile(Language(), lowering="eager", debug=CHUNKED)
    with torch.no_grad():
        torch.testing.assert_close(model(x, y), Language()(x, y))
    check_no_logits(model.graphs, x.numel() - len(x))
    (node,) = (node for node in model.graphs["eval"].graph.nodes if "chunked" in node.name)
    assert all(value.numel() <= 1 for value in node.meta["val"])


# -- the schedule ----------------------------------------------------------------------------------------------------


@pytest.mark.shows("H4")
def test_the_plan_of_a_large_vocabulary() -> None:
    """2 × 4096 tokens and 131072 classes are 2 GiB of logits in bf16."""
    with torch.device("meta"):
        model = Llama(LlamaConfig(vocab=2**17, dim=512, layers=1, heads=4, hidden=512))
    tokens = torch.empty(2, 4096, dtype=torch.int64, device="meta")
    precision = fxshard.Precision(torch.bfloat16, torch.float32)

    def plan(return_logits: bool) -> fxshard.Schedule:
        choices = {"precision": precision, "return_logits": return_logits, "lowering": "eager"}
        return fxshard.plan(model, (tokens, tokens), world_size=8, **choices)

    chunked, full = plan(return_logits=False), plan(return_logits=True)
    logits = 2 * 4096 * 2**17 * 2
    assert full.activation_bytes > logits
    assert chunked.activation_bytes < logits // 4
    peaks = [schedule.simulate("h200").peak_bytes for schedule in (chunked, full)]
    assert peaks[0] < peaks[1] - logits // 2
    flops = [sum(event.flops for event in schedule.events) for schedule in (chunked, full)]
    assert flops[0] == flops[1], "each product is computed once"


@pytest.mark.shows("H4")
def test_backward_does_not_gather_the_head() -> None:
    """Its gradients are computed in forward, and go into its bucket as others do."""
    x = torch.empty(2, 16, dtype=torch.int64, device="meta")

    def events(chunk_loss: bool, kind: Kind) -> list[str]:
        debug = fxshard.Debug(chunk_loss=chunk_loss, keep_resident=False)
        options: dict[str, Any] = {"units": ["emb", "layers.*"], "debug": debug, "lowering": "eager"}
        schedule = fxshard.plan(Tied(), (x, x), world_size=2, **options)
        return [event.bucket for event in schedule.events if event.kind is kind and event.phase is Phase.BACKWARD]

    assert any("emb" in bucket for bucket in events(False, Kind.UNSHARD))
    assert not any("emb" in bucket for bucket in events(True, Kind.UNSHARD))
    assert events(True, Kind.REDUCE) == events(False, Kind.REDUCE)


# -- transformers ----------------------------------------------------------------------------------------------------


def hugging_face(kind: str) -> nn.Module:
    hf = pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False}
    torch.manual_seed(0)
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes, final_logit_softcapping=2.0))


@pytest.mark.shows("H4")
@pytest.mark.parametrize("kind", [thorough("llama"), "gemma2"])
def test_models_of_transformers_without_their_logits(kind: str) -> None:
    tokens = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :4] = -100
    plain = hugging_face(kind)
    expected = plain(input_ids=tokens, labels=labels, num_items_in_batch=torch.tensor(18))
    expected.loss.backward()
    model = fxshard.compile(hugging_face(kind), lowering="eager", return_logits=False, debug=CHUNKED)
    found = model(input_ids=tokens, labels=labels, num_items_in_batch=torch.tensor(18))
    found.loss.backward()
    assert found.logits is None and type(found) is type(expected)
    torch.testing.assert_close(found.loss, expected.loss)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-6)
    check_no_logits(model.graphs, tokens.numel(), 64)
    assert [entry.where for entry in model.report.loss.chunked] == ["lm_head"]
    with torch.no_grad():  # without labels there is no loss, and logits are what is asked for
        torch.testing.assert_close(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)


def test_graph_breaks_and_dropped_logits_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="return_logits=False needs the whole model in one graph"):
        fxshard.compile(Language(), return_logits=False, fullgraph=False)
    with pytest.raises(ConfigError, match="expected True or False"):
        fxshard.compile(Language(), return_logits="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="chunk_loss='yes'"):
        fxshard.Debug(chunk_loss="yes")  # type: ignore[arg-type]
