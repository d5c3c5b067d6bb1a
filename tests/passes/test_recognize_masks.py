"""recognize_masks: a causal mask is recognised, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from fxshard.passes import constant_values
from fxshard.passes.context import PassContext
from fxshard.passes.options import Options
from fxshard.passes.recognize_masks import recognize_masks
from fxshard.schedule.attention_report import AttentionReport
from fxshard.schedule.events import Phase
from tests.passes.masked import INF, Rewritten, S, check_close, check_equal, lower, qkv, repeat_kv
from tests.thorough import thorough

# -- models ----------------------------------------------------------------------------------------------------------


def make(kind: str, *, kv_heads: int = 2, **more: Any) -> nn.Module:
    hf = pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 32, **more}
    config, model = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM),
        "gemma3": (hf.Gemma3TextConfig, hf.Gemma3ForCausalLM),
    }[kind]
    torch.manual_seed(0)
    return model(config(**sizes))


def rewritten_model(model: nn.Module, **more: Tensor) -> Rewritten:
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))

    def loss(tokens: Tensor, more: dict[str, Tensor]) -> Tensor:
        return model(input_ids=tokens, labels=tokens, use_cache=False, **more).loss

    return Rewritten(loss, tokens, more)


def check_no_mask(found: Rewritten) -> None:
    for node in found.attention():
        assert node.kwargs["attn_mask"] is None and node.kwargs["is_causal"] is True
    tensors = [node.meta.get("example_value") for node in found.after.graph.nodes]
    assert not any(isinstance(each, Tensor) and each.dtype == torch.bool for each in tensors)


@pytest.mark.shows("H1")
@pytest.mark.parametrize("kind", ["llama", thorough("qwen3"), thorough("mistral")])
def test_a_model_from_transformers(kind: str) -> None:
    found = rewritten_model(make(kind, **({"sliding_window": None} if kind == "mistral" else {})))
    assert len(found.report.causal) == 2 and not found.report.masked
    assert all(each.grouped and "self_attn" in each.where for each in found.report.causal)
    check_no_mask(found)
    assert not any("expand" in str(node.target) for node in found.after.graph.nodes)  # heads are not repeated
    check_close(found, 1e-6)


@pytest.mark.shows("H1")
def test_without_groups_all_is_the_same_to_the_last_bit() -> None:
    found = rewritten_model(make("llama", kv_heads=4))
    assert len(found.report.causal) == 2 and not any(each.grouped for each in found.report.causal)
    check_no_mask(found)
    check_equal(found)


@pytest.mark.shows("H1")
def test_layers_in_checkpointed_regions() -> None:
    model = make("llama")
    model.gradient_checkpointing_enable()
    found = rewritten_model(model.train())
    assert len(found.report.causal) == 2 and not found.report.masked
    assert all(node.kwargs["attn_mask"] is None for node in found.attention())
    check_close(found, 1e-6)


@pytest.mark.shows("H2")
def test_sliding_windows_are_kept_where_there_is_no_kernel() -> None:
    kinds = ["sliding_attention", "full_attention"]
    found = rewritten_model(make("gemma3", layer_types=kinds, sliding_window=4))
    (kept,) = found.report.masked
    (causal,) = found.report.causal
    assert kept.reason.startswith("is a window of 4:") and "layers.0" in kept.where and "layers.1" in causal.where
    assert [node.kwargs["is_causal"] for node in found.attention()] == [False, True]
    check_close(found, 1e-6)


@pytest.mark.shows("H2")
@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_what_the_user_gives_is_kept(name: str) -> None:
    """All ones and plain positions in this step say nothing about the next."""
    given = {"attention_mask": torch.ones(2, 12, dtype=torch.int64), "position_ids": torch.arange(12).expand(2, 12)}
    found = rewritten_model(make("llama"), **{name: given[name]})
    assert not found.report.causal and len(found.report.masked) == 2
    reason = {
        "attention_mask": "hides padding:",
        "position_ids": "separates documents:",
    }
    assert all(reason[name] in each.reason for each in found.report.masked)
    assert all(isinstance(node.kwargs["attn_mask"], fx.Node) for node in found.attention())


# -- masks as people write them --------------------------------------------------------------------------------------


CAUSAL: dict[str, Callable[[], Tensor]] = {
    "tril": lower,
    "tril of ones": lambda: torch.tril(torch.ones(S, S)).bool(),
    "not triu": lambda: ~torch.triu(torch.ones(S, S, dtype=torch.bool), diagonal=1),
    "positions": lambda: (torch.arange(S)[None, :] <= torch.arange(S)[:, None]).expand(2, 4, S, S),
    "triu of -inf": lambda: torch.full((S, S), -INF).triu(1),
    "masked_fill": lambda: torch.zeros(S, S).masked_fill(lower().logical_not(), -INF)[None, None],
    "where": lambda: torch.where(lower(), 0.0, -INF),
    "a window of all": lambda: lower() & ~torch.ones(S, S, dtype=torch.bool).tril(-S),
    "both": lambda: torch.logical_and(lower(), torch.ones(1, S, dtype=torch.bool)),
    "to": lambda: lower().to("cpu").to(torch.float32).to(torch.bool),
}


@pytest.mark.shows("H1")
@pytest.mark.parametrize("form", CAUSAL)
def test_a_causal_mask_is_recognised(form: str) -> None:
    found = Rewritten(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, CAUSAL[form](), 0.0, False), *qkv())
    assert len(found.report.causal) == 1, found.report
    assert [node.op for node in found.after.graph.nodes] == [*["placeholder"] * 3, "call_function", "output"]
    check_equal(found)


@pytest.mark.shows("H1")
def test_views_of_the_result_still_work() -> None:
    """A mask of three dimensions is not for torch's fused kernel, which orders its result as the query is."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, lower()[None]).view(2, -1)

    found = Rewritten(attend, *qkv())
    assert len(found.report.causal) == 1
    assert [str(node.target) for node in found.after.graph.nodes][-3:] == ["contiguous", "view", "output"]
    for mine, theirs in zip(*found.compare(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.shows("H1")
def test_under_autocast() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), lower())

    found = Rewritten(attend, *qkv(kv=2))
    assert found.report.causal[0].grouped
    check_close(found, 1e-2)


@pytest.mark.shows("H1")
def test_dropout_stays() -> None:
    found = Rewritten(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, lower(), 0.5, scale=0.1), *qkv())
    (node,) = found.attention()
    assert node.kwargs["dropout_p"] == 0.5 and node.kwargs["scale"] == 0.1
    check_equal(found)


@pytest.mark.shows("H2")
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scores_that_are_not_multiplied_by_a_positive_number_keep_their_mask(scale: float) -> None:
    """Kernels for ``is_causal`` put -inf in place of scores before they multiply: the result would be NaN."""
    found = Rewritten(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, lower(), scale=scale), *qkv())
    assert [kept.reason.split(":")[0] for kept in found.report.masked] == [
        f"is causal, but scores are multiplied by {scale}"
    ]
    check_equal(found)


NOTHING: dict[str, Callable[[], Tensor]] = {
    "all true": lambda: torch.ones(S, S, dtype=torch.bool),
    "for every query of a batch": lambda: torch.ones(2, 1, S, S, dtype=torch.bool),
    "one row for all": lambda: torch.ones(1, S, dtype=torch.bool),
    "zeros": lambda: torch.zeros(1, 1, S, S),
    "a comparison": lambda: torch.arange(S)[:, None] >= -torch.arange(S),
}


@pytest.mark.shows("H1")
@pytest.mark.parametrize("form", NOTHING)
def test_a_mask_that_hides_nothing_is_left_out(form: str) -> None:
    found = Rewritten(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=NOTHING[form]()), *qkv())
    assert len(found.report.unmasked) == 1 and not found.report.masked and not found.report.causal
    (node,) = found.attention()
    assert node.kwargs["attn_mask"] is None and node.kwargs["is_causal"] is False
    check_close(found, 1e-6)


def test_what_a_decoder_sees_of_an_encoder_needs_no_mask() -> None:
    """Queries and keys of different lengths, and a scale that says nothing about a mask that hides nothing."""
    (q, _, _), (_, k, v) = qkv(), qkv(s=S + 2)
    mask = lambda: torch.ones(S, S + 2, dtype=torch.bool)  # noqa: E731
    found = Rewritten(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(), scale=-0.5), q, k, v)
    assert len(found.report.unmasked) == 1
    check_close(found, 1e-6)


def test_an_encoder_from_transformers() -> None:
    """Its mask is made where the whole forward is captured, by some versions of transformers."""
    hf = pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=8, num_labels=3, **sizes))
    pixels, labels = torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)
    found = Rewritten(lambda pixels, labels: model(pixel_values=pixels, labels=labels).loss, pixels, labels)
    assert not found.report.masked
    assert all(node.kwargs["attn_mask"] is None for node in found.attention())
    check_close(found, 1e-6)


def _written_later() -> Tensor:
    mask = lower()
    mask[0, 1] = True
    return mask


def _written_through_a_view() -> Tensor:
    mask = lower()
    mask[1:, 1:].transpose(0, 1).fill_(False)
    return mask


def _one_slice_differs() -> Tensor:
    return torch.stack([lower(), lower(), lower(), lower().fliplr()]).expand(2, 4, S, S)


@torch.library.custom_op("fxshard_tests::mask_of_another", mutates_args=())
def mask_of_another(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


@mask_of_another.register_fake
def _(size: int) -> Tensor:
    return torch.empty(size, size, dtype=torch.bool)


@torch._dynamo.allow_in_graph
def opaque() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


OTHERS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "all true but one": (lambda: ~(torch.ones(S, S, dtype=torch.bool).tril(-2).triu(-2)), "is not causal"),
    "as large as a bias": (lambda: torch.zeros(S, S) + 1e-30, "is not causal"),
    "offset": (lambda: torch.ones(S, S, dtype=torch.bool).tril(1), f"is a window of {S} and 1 after it"),
    "offset down": (lambda: torch.ones(S, S).tril(-1).bool() | torch.eye(S).bool().flip(0), "is not causal"),
    "window": (lambda: lower() & lower().triu(-2), "is a window of 3"),
    "transposed": (lambda: lower().transpose(0, 1), f"is a window of 1 and {S - 1} after it"),
    "one slice": (_one_slice_differs, "is not causal"),
    "bias": (lambda: torch.full((S, S), -INF).triu(1) + 0.5, "is not causal"),
    "lowest": (lambda: torch.full((S, S), torch.finfo(torch.float32).min).triu(1), "is not causal"),
    "whole numbers as bias": (lambda: lower().float(), "is not causal"),
    "one row for all": (lambda: torch.arange(S)[None] > 0, "is not square"),
    "random": (lambda: torch.rand(S, S).tril() >= 0, "rand"),
    "dropout": (lambda: F.dropout(torch.zeros(S, S), 0.5) + torch.full((S, S), -INF).triu(1), "dropout"),
    "uninitialised": (lambda: torch.empty(S, S).tril() * 0 + torch.full((S, S), -INF).triu(1), "empty"),
    "written later": (_written_later, "may be written to"),
    "written through a view": (_written_through_a_view, "may be written to"),
    "a custom operator": (lambda: mask_of_another(S), "mask_of_another"),
    "an opaque function": (opaque, "opaque"),
    "rounded elsewhere": (lambda: torch.linspace(0, 1, S)[:, None] >= torch.linspace(0, 1, S), "linspace"),
    "positions with fractions": (lambda: torch.arange(0, 1, 1 / S)[:, None] >= torch.arange(0, 1, 1 / S), "arange"),
}


@pytest.mark.shows("H2")
@pytest.mark.parametrize("form", OTHERS)
def test_another_mask_is_kept(form: str) -> None:
    make_mask, reason = OTHERS[form]
    found = Rewritten(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make_mask()), *qkv())
    (kept,) = found.report.masked
    assert reason in kept.reason and not found.report.causal
    (node,) = found.attention()
    assert isinstance(node.kwargs["attn_mask"], fx.Node)


class Holding(nn.Module):
    """A model that holds its mask: it is causal today."""

    def __init__(self, how: str) -> None:
        super().__init__()
        mask = torch.full((S, S), -INF).triu(1)
        if how == "parameter":
            self.mask = nn.Parameter(mask)
        elif how == "buffer":
            self.register_buffer("mask", mask)
        else:
            self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask + torch.zeros(S, S))


@pytest.mark.shows("H2")
@pytest.mark.parametrize("how", ["parameter", "buffer", "attribute"])
def test_a_mask_that_the_model_holds_is_kept(how: str) -> None:
    found = Rewritten(Holding(how), *qkv())
    (kept,) = found.report.masked
    assert "mask" in kept.reason and not found.report.causal


@pytest.mark.shows("H2")
def test_a_constant_of_the_graphs_module_is_kept() -> None:
    module = graph_of(lower())
    module.register_buffer("mask", lower())
    (made,) = (node for node in module.graph.nodes if node.target is torch.tensor)
    made.op, made.target, made.args, made.kwargs = "get_attr", "mask", (), {}
    context = PassContext((), Options(), Phase.FORWARD)
    recognize_masks(module, context)
    (kept,) = context.attention.masked
    assert "depends on mask, which the module holds" in kept.reason


@pytest.mark.shows("H2")
def test_a_mask_made_like_an_input_is_kept() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, q.new_ones(q.shape[2], q.shape[2], dtype=torch.bool).tril())

    found = Rewritten(attend, *qkv(), dynamic=True)
    (kept,) = found.report.masked
    assert "depends on q" in kept.reason and not found.report.causal


@pytest.mark.shows("H2")
def test_queries_of_another_length_are_left_alone() -> None:
    (q, _, _), (_, k, v) = qkv(), qkv(s=S + 2)
    mask = lambda: torch.ones(S, S + 2, dtype=torch.bool).tril()  # noqa: E731
    found = Rewritten(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask()), q, k, v)
    (kept,) = found.report.masked
    assert "is not square" in kept.reason


def test_a_mask_that_is_too_large_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constant_values, "LARGEST", S * S - 1)
    found = Rewritten(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, lower()), *qkv())
    (kept,) = found.report.masked
    assert "too many" in kept.reason


def test_what_else_uses_the_mask_keeps_it() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = lower()
        return F.scaled_dot_product_attention(q, k, v, mask) + mask.sum() * q

    found = Rewritten(attend, *qkv())
    assert len(found.report.causal) == 1
    assert any(node.target == "tril" for node in found.after.graph.nodes)
    check_equal(found)


# -- any mask at all -------------------------------------------------------------------------------------------------


def graph_of(mask: Tensor) -> fx.GraphModule:
    """Attention with a mask of these numbers, as Dynamo would put it down."""
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in "qkv"]
    for node, tensor in zip(operands, qkv(s=mask.shape[-2], dtype=_dtype(mask)), strict=True):
        node.meta["example_value"] = tensor
    made = graph.call_function(torch.tensor, (mask.tolist(),), {"dtype": mask.dtype})
    made.meta["example_value"] = mask
    out = graph.call_function(F.scaled_dot_product_attention, tuple(operands), {"attn_mask": made})
    tensors = [node.meta["example_value"] for node in operands]
    out.meta["example_value"] = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    graph.output((out,))
    return fx.GraphModule({}, graph)


def _dtype(mask: Tensor) -> torch.dtype:
    return torch.float32 if mask.dtype == torch.bool else mask.dtype


def is_causal(mask: Tensor) -> bool:
    """Element by element."""
    size, kind = mask.shape[-1], mask.dtype
    kept, left_out = (True, False) if kind == torch.bool else (0.0, -INF)
    for part in mask.reshape(-1, size, size).tolist():
        for r, row in enumerate(part):
            if any(element != (kept if c <= r else left_out) for c, element in enumerate(row)):
                return False
    return True


def hides_nothing(mask: Tensor) -> bool:
    return all(element in (True, 0.0) and element is not False for element in mask.flatten().tolist())


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    """Causal masks, and such as differ from one in something."""
    size = draw(st.integers(1, 6))
    leading = draw(st.sampled_from([(), (1,), (1, 1), (2, 1), (1, 4), (2, 4)]))
    kind = draw(st.sampled_from([torch.bool, torch.float32, torch.bfloat16]))
    diagonal = draw(st.sampled_from([0, 0, 0, 1, -1, size]))
    keep = torch.ones(*leading, size, size, dtype=torch.bool).tril(diagonal)
    if draw(st.integers(0, 3)) == 0:
        keep &= ~torch.ones(size, size, dtype=torch.bool).tril(-draw(st.integers(1, size)))
    numbers = draw(st.sampled_from([-INF, -INF, -INF, torch.finfo(torch.bfloat16).min, -1e4]))
    mask = keep if kind == torch.bool else torch.zeros(keep.shape, dtype=kind).masked_fill(~keep, numbers)
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        place = tuple(draw(st.integers(0, n - 1)) for n in mask.shape)
        other = [0.0, -INF, 0.5, -1e-30, float("nan"), -1e4]
        mask[place] = draw(st.booleans()) if kind == torch.bool else draw(st.sampled_from(other))
    return mask


@pytest.mark.shows("H2")
@settings(max_examples=50)
@given(masks())
def test_a_mask_is_left_out_if_and_only_if_every_element_says_so(mask: Tensor) -> None:
    module = graph_of(mask)
    expected = module(*qkv(s=mask.shape[-1], dtype=_dtype(mask)))[0]
    context = PassContext((), Options(), Phase.FORWARD)
    recognize_masks(module, context)
    causal = is_causal(mask) and not hides_nothing(mask)
    assert len(context.attention.causal) == causal
    assert len(context.attention.unmasked) == hides_nothing(mask)
    assert len(context.attention.masked) == 1 - causal - hides_nothing(mask)
    found = module(*qkv(s=mask.shape[-1], dtype=_dtype(mask)))[0]
    rounding = 2e-2 if mask.dtype == torch.bfloat16 else 1e-6  # masks of some shapes go to another kernel
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.shows("H2")
@settings(max_examples=30)
@given(st.data())
def test_one_element_anywhere_makes_another_mask(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 40))
    mask = torch.ones(2, 1, size, size, dtype=torch.bool).tril()
    place = tuple(data.draw(st.integers(0, n - 1)) for n in mask.shape)
    mask[place] = ~mask[place]
    context = PassContext((), Options(), Phase.FORWARD)
    recognize_masks(graph_of(mask), context)
    assert not context.attention.causal and not context.attention.unmasked


# -- the report ------------------------------------------------------------------------------------------------------


def test_the_report_says_how_many_and_why() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(q, k, v, lower())
        x = F.scaled_dot_product_attention(x, k, v, lower())
        return F.scaled_dot_product_attention(x, k, v, given)

    found = Rewritten(attend, *qkv(), lower())
    assert str(found.report).splitlines() == [
        "the model itself and 1 more: causal, without a mask",
        "the model itself: keeps its mask, which depends on given, an input of the graph",
    ]
    assert "no attention" in str(AttentionReport())
