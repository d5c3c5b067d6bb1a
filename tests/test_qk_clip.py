"""QK-clip: heads whose largest logit exceeds a limit are scaled down to it, as plain PyTorch does with all logits."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from tests.optim.late import known_late
from tests.pool import Pool
from tests.thorough import thorough
from tests.toy import batch

VOCAB, HEADS, WIDTH = 64, 4, 8
ADAMW = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}


def make(kind: str, layers: int = 1) -> nn.Module:
    """Models with ``HEADS`` heads of ``WIDTH``."""
    torch.manual_seed(0)
    if kind in ("ours", "grouped"):
        kv = HEADS if kind == "ours" else 2
        return Llama(LlamaConfig(vocab=VOCAB, dim=32, layers=layers, heads=HEADS, kv_heads=kv, hidden=48))
    import transformers as hf

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 32,
        "use_cache": False,
    }
    if kind == "neox":  # query, key and value of each head in turn, with biases; rotary positions on a part of a head
        model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes, rotary_pct=0.5, attention_bias=True))
    elif kind == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=WIDTH))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=2))
        if kind == "checkpointed":
            model.gradient_checkpointing_enable()
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "query_key_value" in name:
            nn.init.normal_(parameter, std=0.3)  # else logits are all but zero
    return model.train()


def loss_of(model: nn.Module, kind: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x, y) if kind in ("ours", "grouped") else model(input_ids=x, labels=x).loss


class Logits(TorchFunctionMode):
    """Computes what attention hides: all logits of each call, and of each head the largest that a query sees."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            query, key = (each.detach() for each in args[:2])
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
            logits = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~seen, -math.inf)
            self.largest.append(logits.amax((0, 2, 3)))
        return function(*args, **(kwargs or {}))


def rows_of(model: nn.Module, kind: str, layer: int) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """Parameters of queries and of keys as [heads, rows, ...], and whether heads share keys."""
    named = dict(model.named_parameters())
    if kind == "neox":
        fused = [named[f"gpt_neox.layers.{layer}.attention.query_key_value.{each}"] for each in ("weight", "bias")]
        apart = [each.detach().unflatten(0, (HEADS, 3, WIDTH)) for each in fused]
        return [each[:, 0] for each in apart], [each[:, 1] for each in apart], False
    ours = kind in ("ours", "grouped")
    path = f"layers.{layer}.attention.{{}}.weight" if ours else f"model.layers.{layer}.self_attn.{{}}_proj.weight"
    query, key = (named[path.format(each)].detach().unflatten(0, (-1, WIDTH)) for each in "qk")
    return [query], [key], len(key) < len(query)


def clip(model: nn.Module, kind: str, largest: list[torch.Tensor], limit: float) -> int:
    """The rule, on whole parameters; returns how many heads it changed."""
    clipped = 0
    for layer, of_heads in enumerate(largest):
        queries, keys, shared = rows_of(model, kind, layer)
        for head, logit in enumerate(of_heads.tolist()):
            if logit > limit:
                clipped += 1
                for each in [*queries, *([] if shared else keys)]:
                    each[head].mul_(limit / logit if shared else math.sqrt(limit / logit))
    return clipped


def plain(kind: str, limit: float, optimizer: Any, steps: int, micro: int, ranks: int) -> tuple[nn.Module, list[int]]:
    """One process, all batches; transformers repeats heads of keys itself and says ``is_causal``."""
    model = make("llama" if kind == "checkpointed" else kind)
    update = optimizer(model)
    clipped = []
    for step in range(steps):
        seen: list[list[torch.Tensor]] = []
        for part in range(micro):
            with Logits() as spy:
                loss = loss_of(model, kind, *batch(10 * step + part, ranks, 0, VOCAB, size=2 * ranks))
            (loss / micro).backward()
            seen.append(spy.largest)
        update.step()
        update.zero_grad()
        largest = [torch.stack(each).amax(0) for each in zip(*seen, strict=True)]
        clipped.append(clip(model, kind, largest, limit))
    return model, clipped


def sharded(kind: str, optimizer: Any, steps: int, micro: int, **options: Any) -> dict[str, torch.Tensor]:
    model = fxshard.compile(make(kind), optimizer=optimizer, lowering="eager", **options)
    for step in range(steps):
        for part in range(micro):
            with model.no_sync() if part < micro - 1 else contextlib.nullcontext():
                data = batch(10 * step + part, dist.get_world_size(), dist.get_rank(), VOCAB, size=2)
                (loss_of(model, kind, *data) / micro).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
    return model.full_state_dict()


LIMIT = {"ours": 0.5, "grouped": 0.5, "llama": 0.15, "neox": 0.6, "checkpointed": 0.15}


@pytest.mark.parametrize(
    ("kind", "micro", "zero"),
    [
        thorough("neox", 1, 1),
        thorough("checkpointed", 2, 3),
        ("ours", 2, 3),
        thorough("grouped", 1, 2),
        thorough("llama", 2, 3),
    ],
)
def test_equals_plain_pytorch_with_all_logits_on_two_ranks(ranks: Pool, kind: str, micro: int, zero: int) -> None:
    if kind not in ("ours", "grouped"):
        pytest.importorskip("transformers")
    limit = LIMIT[kind]
    make_adamw = lambda model: torch.optim.AdamW(model.parameters(), **ADAMW)  # noqa: E731
    reference, clipped = plain(kind, limit, make_adamw, 2, micro, 2)
    assert all(count > 0 for count in clipped) and sum(clipped) < 2 * HEADS, clipped  # some heads, not all
    choice = fxshard.AdamW(**ADAMW, qk_clip=limit)  # type: ignore[arg-type]
    for found in ranks(2, sharded, kind, choice, 2, micro, zero=zero):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", [thorough("whole"), "rows"])
def test_muon_clips_after_its_update_wherever_matrices_are(ranks: Pool, layout: str) -> None:
    """Newton–Schulz in bf16 makes much of the last bits of gradients; what is not clipped is twice as large."""
    adamw = fxshard.AdamW(**ADAMW)  # type: ignore[arg-type]
    muon = fxshard.Muon(lr=1e-2, adamw=adamw)
    reference, clipped = plain("grouped", 0.3, muon.build, 2, 1, 2)
    assert min(clipped) > 0
    unclipped, _ = plain("grouped", math.inf, muon.build, 2, 1, 2)
    choice = fxshard.Muon(lr=1e-2, adamw=adamw, qk_clip=0.3)
    name = "layers.0.attention.q.weight"
    expected, without = (dict(model.named_parameters())[name].detach() for model in (reference, unclipped))
    for found in ranks(2, sharded, "grouped", choice, 2, 1, zero=3, layout=layout):
        assert (found[name] - expected).norm() < 0.01 * (without - expected).norm()


@pytest.mark.parametrize("kind", [thorough("ours"), "grouped"])
def test_after_a_clip_no_logit_exceeds_the_limit_for_the_same_input(kind: str) -> None:
    """With one layer and a learning rate of zero attention gets what it got."""
    x, y = batch(0, 1, 0, VOCAB)
    model = fxshard.compile(make(kind), optimizer=fxshard.AdamW(lr=0.0, qk_clip=0.25), lowering="eager")
    model(x, y).backward()
    model.optimizer.step()
    after = make(kind)
    with Logits() as before:
        after(x, y)
    after.load_state_dict(model.full_state_dict())
    with Logits() as spy:
        after(x, y)
    (largest,), (logits,) = before.largest, spy.largest
    assert (largest > 0.25).all() and torch.allclose(logits, torch.full((HEADS,), 0.25), rtol=1e-6)


def skipped() -> list[tuple[bool, bool]]:
    """Whether a step that is not made leaves all bits, and whether the next one, of other logits, clips.

    Where the host knows it at once, and where it is known late.
    """
    choice = fxshard.AdamW(lr=0.0, qk_clip=0.25, nan="skip")
    model = fxshard.compile(make("ours"), optimizer=choice, lowering="eager")
    before = copy.deepcopy(model.full_state_dict())
    data = batch(0, dist.get_world_size(), dist.get_rank(), VOCAB)
    pairs = []
    for knowing in (contextlib.nullcontext, known_late):
        found = []
        model.load_state_dict(before)
        with knowing(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for poison in (True, False):
                model(*data).backward()
                if poison and dist.get_rank() == 0:
                    next(p for p in model.parameters() if p.grad is not None).grad.to_local().fill_(math.nan)
                model.optimizer.step()
                model.optimizer.zero_grad()
                after = model.full_state_dict()
                found.append(all(torch.equal(after[name], before[name]) for name in before))
        pairs.append((found[0], found[1]))
    return pairs


@pytest.mark.shows("X6")
def test_a_step_that_is_not_made_clips_nothing(ranks: Pool) -> None:
    assert ranks(2, skipped) == [[(True, False)] * 2] * 2


@pytest.mark.thorough
def test_layers_that_repeat_are_still_traced_once() -> None:
    x, y = batch(0, 1, 0, VOCAB)
    model = fxshard.compile(make("grouped", layers=7), optimizer=fxshard.AdamW(qk_clip=1.0), lowering="eager")
    model(x, y).backward()
    assert model.report.compilations.layers_folded > 0
    plain = make("grouped", layers=7)
    with Logits() as spy:
        plain(x, y)
    torch.testing.assert_close(model._sharding.engine.logits.take(), torch.cat(spy.largest))


@pytest.mark.thorough
def test_an_evaluation_is_not_measured() -> None:
    x, y = batch(0, 1, 0, VOCAB)
    model = fxshard.compile(make("ours"), optimizer=fxshard.AdamW(qk_clip=1.0), lowering="eager")
    with torch.no_grad():
        model(x, y)
    model(x, y).backward()
    model.optimizer.step()
    assert not any("push_largest_logits" in str(node.target) for node in model.graphs["eval"].graph.nodes)
    with pytest.raises(fxshard.StateError, match="no attention was measured since the last step"):
        model.optimizer.step()


@pytest.mark.thorough
def test_a_plan_counts_the_scores() -> None:
    x, y = batch(0, 1, 0, VOCAB)
    flops = {
        limit: sum(
            event.flops
            for event in fxshard.plan(
                make("ours"), (x, y), world_size=2, optimizer=fxshard.AdamW(qk_clip=limit), lowering="eager"
            ).events
        )
        for limit in (None, 1.0)
    }
    batches, length = x.shape
    assert flops[1.0] - flops[None] == batches * HEADS * length * length * WIDTH  # half of it unseen


class Eager(nn.Module):
    """Attention without the function that is recognised."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return ((q @ k.mT).softmax(-1) @ v).sum()


def test_what_cannot_be_bounded_is_refused_by_name() -> None:
    pytest.importorskip("transformers")
    x, _ = batch(0, 1, 0, VOCAB)
    model = fxshard.compile(make("qwen3"), optimizer=fxshard.Muon(qk_clip=1.0), lowering="eager")
    with pytest.raises(fxshard.CaptureError, match=r"mul at model.layers.0.self_attn.q_norm lies between them"):
        model(input_ids=x, labels=x)
    model = fxshard.compile(Eager(), optimizer=fxshard.AdamW(qk_clip=1.0), lowering="eager")
    with pytest.raises(fxshard.CaptureError, match='attn_implementation="sdpa"'):
        model(torch.randn(2, 4, 8))


def test_choices_are_checked() -> None:
    for wrong in (0.0, -1.0, math.inf, math.nan):
        for kind in (fxshard.AdamW, fxshard.Muon):
            with pytest.raises(fxshard.ConfigError, match=rf"{kind.__name__}\(qk_clip={wrong}\) is out of range"):
                kind(qk_clip=wrong)
    with pytest.raises(fxshard.ConfigError, match="say it to Muon alone"):
        fxshard.Muon(adamw=fxshard.AdamW(qk_clip=1.0))
    with pytest.raises(fxshard.ConfigError, match="measured in compiled graphs"):
        fxshard.Muon(qk_clip=1.0).build(make("ours"))
    with pytest.raises(fxshard.ConfigError, match="one graph"):
        fxshard.compile(make("ours"), optimizer=fxshard.Muon(qk_clip=1.0), fullgraph=False)
