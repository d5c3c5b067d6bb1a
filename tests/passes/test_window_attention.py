"""recognize_masks: windows and documents become ranges of keys, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fxshard
from fxshard.kernels.window_op import document_bounds, visible, window_attention
from fxshard.passes.constant_values import NotConstant
from fxshard.passes.match_range import window_of
from fxshard.schedule.attention_report import WindowCall
from tests.passes.masked import INF, Rewritten, S, lower, qkv, repeat_kv
from tests.passes.test_recognize_masks import make
from tests.thorough import thorough

WHERE = ("model.layers.0.self_attn", "model.layers.1.self_attn")


def windowed(window: int) -> Tensor:
    return lower() & lower().triu(1 - window)


def check_results(found: Rewritten) -> None:
    for mine, theirs in zip(*found.compare(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


# -- models ----------------------------------------------------------------------------------------------------------


def rewritten_model(kind: str, *, checkpointed: bool = False, data: str | None = None, **more: object) -> Rewritten:
    model = make(kind, **more).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    given: dict[str, Tensor] = {}
    if data == "packed":
        given["position_ids"] = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    elif data == "padded":  # one row at its end, the other at its beginning, whose queries see nothing
        given["attention_mask"] = torch.tensor([[1] * 8 + [0] * 4, [0] * 3 + [1] * 9])

    def loss(tokens: Tensor, given: dict[str, Tensor]) -> Tensor:
        return model(input_ids=tokens, labels=tokens, use_cache=False, **given).loss

    return Rewritten(loss, tokens, given, windows=True)


@pytest.mark.shows("H3")
@pytest.mark.parametrize(
    ("window", "data", "checkpointed"),
    [
        thorough(None, None, False),
        thorough(4, None, False),
        thorough(None, "packed", False),
        (4, "packed", True),
        thorough(None, None, True),
        thorough(None, "packed", True),
        thorough(4, None, True),
        thorough(4, "packed", False),
        (None, "padded", True),
        (4, "padded", False),
    ],
)
def test_a_model_from_transformers(window: int | None, data: str | None, checkpointed: bool) -> None:
    found = rewritten_model("mistral", checkpointed=checkpointed, data=data, sliding_window=window)
    if window is None and data is None:
        assert len(found.report.causal) == 2 and not found.report.windows
    else:
        assert found.report.windows == [
            WindowCall(where, window, data == "packed", data == "padded") for where in WHERE
        ]
        assert not found.attention()
    assert not found.report.masked
    if not checkpointed:  # whose regions take the mask that they do not read, until autograd
        values = [node.meta.get("example_value") for node in found.after.graph.nodes]
        assert not any(isinstance(each, Tensor) and each.shape[-2:] == (12, 12) for each in values), "no mask is left"
    check_results(found)


@pytest.mark.shows("H3")
def test_layers_of_two_kinds() -> None:
    found = rewritten_model("gemma3", layer_types=["sliding_attention", "full_attention"], sliding_window=4)
    assert found.report.windows == [WindowCall(WHERE[0], 4, False)]
    assert [call.where for call in found.report.causal] == [WHERE[1]]
    check_results(found)


# -- masks as people write them --------------------------------------------------------------------------------------


WINDOWS: dict[str, Callable[[], Tensor]] = {
    "triu": lambda: windowed(3),
    "distance": lambda: lower() & (torch.arange(S)[:, None] - torch.arange(S)[None] < 3),
    "-inf": lambda: torch.zeros(S, S).masked_fill(~windowed(3), -INF),
    "for every sequence and head": lambda: windowed(3).expand(2, 4, S, S),
}
AROUND: dict[tuple[int | None, int | None], Callable[[], Tensor]] = {
    (2, 1): lambda: abs(torch.arange(S)[:, None] - torch.arange(S)) < 2,
    (3, 1): lambda: torch.ones(S, S).tril(1).triu(-2).bool(),
    (1, 2): lambda: torch.zeros(S, S).masked_fill(~torch.ones(S, S).tril(2).triu().bool(), -INF),
    (None, 1): lambda: torch.ones(S, S, dtype=torch.bool).tril(1),
    (2, None): lambda: torch.ones(S, S).triu(-1).bool(),
}
"""Windows that go on after a query: how many keys up to its own, and how many after it."""


@pytest.mark.shows("H2")
@pytest.mark.parametrize("form", WINDOWS)
@pytest.mark.parametrize("kv", [4, 2])
def test_a_window_is_recognised(form: str, kv: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (k, v) if kv == 4 else (repeat_kv(k), repeat_kv(v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=WINDOWS[form](), scale=0.3)

    found = Rewritten(attend, *qkv(kv=kv), windows=True)
    assert found.report.windows == [WindowCall("the model itself", 3, False)]
    assert not any("expand" in str(node.target) for node in found.after.graph.nodes), "heads are not repeated"
    check_results(found)


@pytest.mark.shows("H2")
@pytest.mark.parametrize("size", AROUND)
def test_a_window_around_each_query_is_recognised(size: tuple[int | None, int | None]) -> None:
    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=AROUND[size]())

    found = Rewritten(attended, *qkv(), windows=True)
    assert found.report.windows == [WindowCall("the model itself", size[0], False, ahead=size[1])]
    check_results(found)


def attend(mask: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, begins: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(begins))


def pairs(numbers: Tensor, rows: int = 2) -> Tensor:
    """Which tokens have the same number, as transformers writes it."""
    batch, at = torch.arange(rows)[:, None, None, None], torch.arange(S)
    return numbers[batch, at[None, None, :, None]] == numbers[batch, at[None, None, None, :]]


BEGINS = torch.tensor([[1, 0, 1, 0, 0], [1, 0, 0, 0, 1]]).bool()


@pytest.mark.shows("H3")
@pytest.mark.parametrize("window", [2, S])
def test_documents_are_recognised(window: int) -> None:
    found = Rewritten(attend(lambda begins: windowed(window) & pairs(begins.cumsum(-1))), *qkv(), BEGINS, windows=True)
    assert found.report.windows == [WindowCall("the model itself", window if window < S else None, True)]
    check_results(found)


@pytest.mark.shows("H3")
@pytest.mark.parametrize("window", [True, False])
def test_documents_of_an_encoder_are_recognised(window: bool) -> None:
    def mask(begins: Tensor) -> Tensor:
        same = pairs(begins.cumsum(-1))
        return AROUND[2, 1]() & same if window else same

    found = Rewritten(attend(mask), *qkv(), BEGINS, windows=True)
    size, ahead = (2, 1) if window else (None, None)
    assert found.report.windows == [WindowCall("the model itself", size, True, ahead=ahead)]
    check_results(found)


def _written(begins: Tensor) -> Tensor:
    numbers = begins.cumsum(-1)
    mask = lower() & pairs(numbers)
    numbers.add_(1)
    return mask


def _shifted(numbers: Tensor) -> Tensor:
    batch, at = torch.arange(2)[:, None, None, None], torch.arange(S)
    return numbers[batch, at[None, None, :, None]] == numbers[batch, at.flip(0)[None, None, None, :]]


def _other_row(numbers: Tensor) -> Tensor:
    batch, at = torch.arange(2)[:, None, None, None], torch.arange(S)
    return numbers[batch, at[None, None, :, None]] == numbers[1 - batch, at[None, None, None, :]]


PADDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "of tokens": lambda kept: lower() & kept[:, None, None, :],
    "as transformers writes it": lambda kept: (
        lower() & kept[torch.arange(2)[:, None, None, None], torch.arange(S)[None, None, None, :]]
    ).expand(2, -1, S, S),
    "the other way round": lambda kept: windowed(3) & ~(~kept)[:, None, None, :].to(torch.bool),
    "of an encoder": lambda kept: kept[:, None, None, :].expand(2, 1, S, S),
    "of an encoder, as transformers writes it": lambda kept: (
        (torch.arange(S)[None, None, :, None] >= 0)
        & kept[torch.arange(2)[:, None, None, None], torch.arange(S)[None, None, None, :]]
    ).expand(2, -1, S, S),
    "of an encoder with a window": lambda kept: AROUND[2, 1]() & kept[:, None, None, :],
}
SIZES = {"the other way round": (3, 0), "of an encoder with a window": (2, 1)}


@pytest.mark.shows("H2")
@pytest.mark.parametrize("form", PADDINGS)
def test_padding_is_recognised(form: str) -> None:
    found = Rewritten(attend(PADDINGS[form]), *qkv(), BEGINS, windows=True)
    window, ahead = SIZES.get(form, (None, None if "encoder" in form else 0))
    assert found.report.windows == [WindowCall("the model itself", window, False, True, ahead)]
    check_results(found)  # in a window of 3, the fourth query of the second row sees no key


def _hidden_later(kept: Tensor) -> Tensor:
    kept = kept.clone()
    mask = lower() & kept[:, None, None, :]
    kept.fill_(True)
    return mask


NEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers that may fall": lambda begins: lower() & pairs(begins.long()),
    "sums of numbers that may be negative": lambda begins: lower() & pairs((begins.long() - 1).cumsum(-1)),
    "counted down the batch": lambda begins: lower() & pairs(begins.cumsum(0)),
    "counted in a type that wraps around": lambda begins: lower() & pairs(begins.cumsum(-1, dtype=torch.int8)),
    "or": lambda begins: lower() | pairs(begins.cumsum(-1)),
    "unequal": lambda begins: lower() & ~pairs(begins.cumsum(-1)),
    "another bias": lambda begins: lower() & pairs(begins.cumsum(-1)) & begins[:, None, None, :],
    "other tokens": lambda begins: lower() & _shifted(begins.cumsum(-1)),
    "another sequence": lambda begins: lower() & _other_row(begins.cumsum(-1)),
    "written to": _written,
    "queries that are hidden": lambda begins: lower() & begins[:, None, :, None],
    "keys hidden from some heads": lambda begins: lower() & begins.repeat(1, 4)[:, :20].view(2, 4, 1, S),
    "keys hidden in all rows by the first": lambda begins: lower().expand(2, 1, S, S) & begins[:1, None, None, :],
    "one row for all sequences": lambda begins: lower() & begins[:1, None, None, :],
    "documents of one row for all sequences": lambda begins: lower() & pairs(begins[:1].cumsum(-1), rows=1),
    "keys that are padding or seen": lambda begins: lower() | begins[:, None, None, :],
    "two of data": lambda begins: pairs(begins.cumsum(-1)) & begins[:, None, None, :],
    "keys hidden until later": _hidden_later,
    "a window that has a hole": lambda begins: windowed(4) & ~windowed(3).triu(-1).tril(-1) & pairs(begins.cumsum(-1)),
}


@pytest.mark.shows("H2")
@pytest.mark.parametrize("form", NEAR)
def test_what_is_almost_a_mask_of_documents_is_kept(form: str) -> None:
    found = Rewritten(attend(NEAR[form]), *qkv(), BEGINS, windows=True)
    assert len(found.report.masked) == 1 and not found.report.windows
    assert len(found.attention()) == 1
    for mine, theirs in zip(*found.compare(), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_dropout_needs_the_mask() -> None:
    found = Rewritten(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, windowed(3), 0.5), *qkv(), windows=True)
    assert found.report.masked[0].reason == "is a window of 3, but the call has dropout"


def test_only_where_there_is_a_kernel() -> None:
    for windows, reason in ((None, "on CUDA, in half precision"), (False, "Debug(window_attention=False)")):
        found = Rewritten(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, windowed(3)), *qkv(), windows=windows)
        assert reason in found.report.masked[0].reason


@pytest.mark.thorough
def test_a_plan_for_a_gpu_has_no_mask_either() -> None:
    model = make("mistral", head_dim=16, sliding_window=4, num_hidden_layers=1).bfloat16()
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    saved = {
        (hardware, windows): fxshard.plan(
            model,
            inputs,
            world_size=2,
            hardware=hardware,
            lowering="eager",
            debug=fxshard.Debug(window_attention=windows),
        ).saved_bytes
        for hardware, windows in (("h200", None), ("cpu", None))
    }
    assert saved["h200", None] < saved["cpu", None]


# -- all masks -------------------------------------------------------------------------------------------------------


@pytest.mark.shows("H2")
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_mask_is_a_window_if_and_only_if_every_element_says_so(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 7))
    window, ahead = data.draw(st.integers(1, size)), data.draw(st.integers(0, size - 1))
    mask = torch.ones(2, 1, size, size, dtype=torch.bool).tril(ahead) & torch.ones(size, size).triu(1 - window).bool()
    for _ in range(data.draw(st.integers(0, 2))):
        place = tuple(data.draw(st.integers(0, n - 1)) for n in mask.shape)
        mask[place] = ~mask[place]
    sizes = [(w, a) for w in range(1, size + 1) for a in range(size) if all(
        bool(part[0, row, col]) == (row - w < col <= row + a)
        for part in mask for row in range(size) for col in range(size)
    )]  # fmt: skip
    if sizes:
        assert window_of(mask) == sizes[0]
    else:
        with pytest.raises(NotConstant, match="is not causal"):
            window_of(mask)


@pytest.mark.shows("H3")
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_operator_computes_what_torch_does_with_a_mask(data: st.DataObject) -> None:
    length, kv, group = (data.draw(st.integers(1, n)) for n in (20, 2, 3))
    window, ahead = data.draw(st.integers(1, length + 1)), data.draw(st.sampled_from((0, 0, 1, 3, length)))
    hidden = data.draw(st.sampled_from((0.0, 0.3, 0.9)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    sizes = [(2, n, length, 4) for n in (kv * group, kv, kv)]
    leaves = [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]
    begins = torch.rand(2, length, generator=generator) < 0.3
    bounds = document_bounds(begins.cumsum(-1)) if data.draw(st.booleans()) else None
    key_mask = torch.rand(2, 1, 1, length, generator=generator) >= hidden if hidden else None
    query, key, value = leaves
    mask = visible(length, window, ahead, bounds, torch.device("cpu"), key_mask)
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    found = window_attention(*leaves, bounds, key_mask, window, ahead, 0.3)
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    mine, theirs = (torch.autograd.grad(each, leaves, grad) for each in (found, expected))
    for one, other in zip((found, *mine), (expected, *theirs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.shows("H3")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 12))
def test_bounds_of_documents(begins: list[bool], window: int, ahead: int) -> None:
    numbers = torch.tensor([begins]).cumsum(-1)
    mask = visible(len(begins), window, ahead, document_bounds(numbers), torch.device("cpu"))
    for query in range(len(begins)):
        for key in range(len(begins)):
            same = numbers[0, query] == numbers[0, key]
            assert bool(mask[0, 0, query, key]) == bool(same and query - window < key <= query + ahead)
