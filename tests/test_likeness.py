"""A sharded model is used as the plain one was: attributes, methods, generation; what cannot work says what to do."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from tests.hugging_face import llama
from tests.pool import Pool
from tests.thorough import thorough
from tests.toy import Mlp

pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PROMPT = torch.tensor([[3, 4, 5], [6, 7, 8]])
TEXT = torch.arange(3, 27).view(2, 12)


def make(layers: int = 2) -> nn.Module:
    attention = {"attention_dropout": 0.1, "attn_implementation": "eager", "use_cache": True}
    return llama(num_hidden_layers=layers, **TOKENS, **attention)


def with_and_without(zero: int) -> tuple[bool, bool, bool]:
    """Two steps with dropout, and the next two from there on: at once, and after an evaluation and a generation."""
    model = fxshard.compile(make(1), zero=zero, optimizer=fxshard.AdamW(lr=1e-2), lowering="eager")
    torch.manual_seed(1 + dist.get_rank())

    def train(steps: range) -> list[Any]:
        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            tokens = torch.randint(3, 64, (2, 12), generator=generator)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *model.full_state_dict().values()]

    train(range(2))
    state, moments = model.full_state_dict(), copy.deepcopy(model.optimizer.state_dict())
    drawn, length = torch.get_rng_state(), 5 + 3 * dist.get_rank()
    straight = train(range(2, 4))
    model.load_state_dict(state)
    model.optimizer.load_state_dict(moments)
    plain = make(1).eval()
    plain.load_state_dict(state)
    torch.set_rng_state(drawn)  # before the evaluation, which draws nothing
    model.eval()
    with torch.no_grad():
        evaluated, expected = (each(input_ids=TEXT, labels=TEXT).loss for each in (model, plain))
    with torch.inference_mode():
        generated, text = (each.generate(PROMPT, max_new_tokens=length, do_sample=False) for each in (model, plain))
    model.train()
    return (
        all(map(torch.equal, train(range(2, 4)), straight)),
        float(evaluated) == pytest.approx(float(expected), rel=1e-6),
        torch.equal(generated, text),
    )


@pytest.mark.shows("H9")
@pytest.mark.parametrize("zero", [3, thorough(1)])
def test_evaluation_and_generation_leave_training_as_it_was(ranks: Pool, zero: int) -> None:
    """Ranks generate different lengths, too."""
    assert ranks(2, with_and_without, zero, timeout=350) == [(True, True, True)] * 2


def likeness() -> dict[str, bool]:
    plain = make()
    before = {
        "signature": inspect.signature(plain.forward),
        "config": plain.config,
        "dtype": plain.dtype,
        "device": plain.device,
        "loss_type": plain.loss_type,
        "main_input_name": plain.main_input_name,
        "parameters": plain.num_parameters(),
    }
    model = fxshard.shard(plain, precision=fxshard.Precision(param=torch.bfloat16))
    found = {
        name: getattr(model, name) == value for name, value in before.items() if name not in ("signature", "parameters")
    }
    found["signature"] = inspect.signature(model.forward) == before["signature"]
    if dist.get_rank() == 0:  # nothing is gathered for it
        found["parameters"] = model.num_parameters() == before["parameters"]
    found["embeddings"] = model.get_input_embeddings() is model.model.embed_tokens
    found["part"] = model.model.layers[1].self_attn.head_dim == 8
    found["nothing else"] = not hasattr(model, "hf_device_map") and not hasattr(model.model, "hf_device_map")
    found["moved nowhere"] = model.to("cpu") is model.to("cpu:1") is model and model.float() is model
    model.loss_type = "ForSequenceClassification"
    model.model.layers[0].self_attn.attention_dropout = 0.5
    found["set"] = (plain.loss_type, plain.model.layers[0].self_attn.attention_dropout) == (model.loss_type, 0.5)
    return found


def test_attributes_are_the_models_own(ranks: Pool) -> None:
    for found in ranks(2, likeness):
        assert all(found.values()), found


@pytest.mark.thorough
def test_gradient_checkpointing_may_be_switched_after_compile() -> None:
    model = fxshard.compile(make(1), lowering="eager")
    saved = []
    for _ in range(2):
        model(input_ids=PROMPT, labels=PROMPT).loss.backward()
        saved.append(model.schedule.saved_bytes)
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()  # as peft asks for, and has no effect here
    assert saved[1] < saved[0]


class Encoder(Mlp):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.net[0](x)

    def score(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self(x, y)

    def rescale(self) -> None:
        with torch.no_grad():
            self.net[0].weight.mul_(2)

    def grow(self) -> None:
        self.extra = nn.Linear(2, 2)


def methods() -> tuple[bool, list[str]]:
    torch.manual_seed(0)
    plain = Encoder(7, 16, 5)
    x = torch.randn(3, 7)
    y = torch.randn(3, 5)
    expected, score = plain.encode(x).detach(), plain(x, y).detach()
    model = fxshard.shard(plain)
    with torch.no_grad():
        same = torch.equal(model.encode(x), expected) and torch.equal(model.score(x, y), score)
    said = []
    for call in (lambda: model.encode(x), model.rescale, model.grow):
        try:
            call()
        except fxshard.StateError as error:
            said.append(str(error))
    return same, said


def test_other_methods_get_weights_or_say_what_to_do(ranks: Pool) -> None:
    for same, said in ranks(2, methods):
        assert same
        assert "encode() computes with parameters while gradients are recorded" in said[0]
        assert "rescale() wrote to net.0.weight" in said[1]
        assert "grow() changed modules or parameters" in said[2]


def test_misuse_says_what_to_do() -> None:
    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters())
    model = fxshard.compile(plain, lowering="eager")
    for call, match in (
        (optimizer.step, r"this AdamW was made before the model was sharded.*model\.parameters\(\)"),
        (lambda: plain(input_ids=PROMPT), r"this LlamaForCausalLM was given to fxshard\.compile"),
        (lambda: plain.model(PROMPT), r"this LlamaModel was given to fxshard\.compile"),
        (lambda: model.model(PROMPT), r"a part of a sharded model \(LlamaModel\) does not run on its own"),
        (model.model.get_input_embeddings, r"get_input_embeddings\(\) of LlamaModel"),
        (lambda: model.resize_token_embeddings(80), r"resize_token_embeddings\(\).*before fxshard\.compile"),
        (lambda: model.push_to_hub("x"), r"push_to_hub\(\).*save_pretrained\(folder\) on every rank"),
        (lambda: setattr(model, "lm_head", nn.Linear(2, 2)), r"'lm_head' cannot be replaced"),
        (model.bfloat16, r"cannot be moved or cast"),
    ):
        with pytest.raises(fxshard.StateError, match=match):
            call()
