"""Masks of open sizes: what is recognised holds at every size, not only at the one that was traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard.passes.constant_values import NotConstant
from fxshard.passes.match_range import match_range
from tests.passes.masked import INF, Rewritten, check_close, check_equal, qkv, repeat_kv

Mask = Callable[[Any], Tensor]
TRACED = 6
"""The size at which functions are captured: masks of other sizes are what is asked for."""


def causal(n: int) -> Tensor:
    return torch.arange(n)[None, :] <= torch.arange(n)[:, None]


def captured(mask: Mask, *, kv: int = 4, windows: bool | None = None) -> Rewritten:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = v.view(k.shape)  # each has a length of its own until then
        return F.scaled_dot_product_attention(q, repeat_kv(k, 4 // kv), repeat_kv(v, 4 // kv), mask(q.shape[2]))

    inputs = qkv(kv=kv, s=TRACED)
    for each in inputs:
        torch._dynamo.mark_dynamic(each, 2)
    return Rewritten(attend, *inputs, dynamic=None, windows=windows)


def same_document(positions: Tensor) -> Tensor:
    """As transformers looks for packed rows: positions that do not follow each other begin another."""
    batch, n = positions.shape
    numbers = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    rows, at = torch.arange(batch)[:, None, None, None], torch.arange(n)
    return numbers[rows, at[None, None, :, None]] == numbers[rows, at[None, None, None, :]]


def documents(n: int) -> Tensor:
    """In positions that it made itself."""
    return causal(n) & same_document(torch.arange(n)[None].expand(2, -1))


def doubled(number: int, times: int) -> Tensor:
    found = torch.full((1,), number)
    for _ in range(times):
        found = found + found
    return found


CAUSAL: dict[str, Mask] = {
    "tril": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "positions": lambda n: causal(n).expand(2, 1, n, n),
    "a view": lambda n: causal(n).view(1, 1, n, n),
    "triu of -inf": lambda n: torch.full((n, n), -INF).triu(1),
    "masked_fill": lambda n: torch.zeros(n, n).masked_fill(causal(n).logical_not(), -INF)[None, None],
    "where": lambda n: torch.where(causal(n), 0.0, -INF),
    "moved and moved back": lambda n: torch.arange(n)[None, :] + 3 - 2 <= torch.arange(n)[:, None] + 1,
    "documents": documents,
}


@pytest.mark.shows("H1")
@pytest.mark.parametrize("form", CAUSAL)
def test_a_causal_mask_of_any_size_is_recognised(form: str) -> None:
    found = captured(CAUSAL[form])
    assert len(found.report.causal) == 1, found.report
    (node,) = found.attention()
    assert node.kwargs["attn_mask"] is None and node.kwargs["is_causal"] is True
    check_equal(found)


@pytest.mark.shows("H1")
def test_heads_are_not_repeated() -> None:
    found = captured(causal, kv=2)
    assert found.report.causal[0].grouped
    check_close(found, 1e-6)


def test_a_mask_that_hides_nothing_at_any_size_is_left_out() -> None:
    assert len(captured(lambda n: torch.arange(n)[:, None] >= -torch.arange(n)).report.unmasked) == 1


def windowed(n: int, window: int) -> Tensor:
    return causal(n) & (torch.arange(n)[None, :] > torch.arange(n)[:, None] - window)


def check_near(found: Rewritten) -> None:
    for mine, theirs in zip(*found.compare(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_window_is_one_at_other_sizes() -> None:
    """At the size that was traced it hides nothing that causal attention shows."""
    (kept,) = captured(lambda n: windowed(n, 1000)).report.masked
    assert "is a window of 1000" in kept.reason
    found = captured(lambda n: windowed(n, 1000), windows=True)
    assert [each.window for each in found.report.windows] == [1000]
    check_near(found)


def test_a_window_around_each_query_is_one_at_any_size() -> None:
    """As transformers writes it for encoders."""
    found = captured(lambda n: (torch.arange(n)[:, None] - torch.arange(n)).abs() <= 40, windows=True)
    assert [(each.window, each.ahead) for each in found.report.windows] == [(41, 40)]
    check_near(found)


@pytest.mark.parametrize("window", [None, 4])
def test_documents_of_rows_of_any_length(window: int | None) -> None:
    """Where they begin is data; what is not limited by a window sees its whole document, however long."""

    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        n = q.shape[2]
        seen = causal(n) if window is None else windowed(n, window)
        return F.scaled_dot_product_attention(
            q, k, v.view(k.shape), (same_document(positions) & seen).expand(2, -1, n, n)
        )

    inputs = qkv(s=TRACED)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]])
    for each, dim in zip((*inputs, positions), (2, 2, 2, 1), strict=True):
        torch._dynamo.mark_dynamic(each, dim)
    found = Rewritten(attend, *inputs, positions, dynamic=None, windows=True)
    assert [(each.window, each.documents) for each in found.report.windows] == [(window, True)]
    check_near(found)
    longer, positions = iter(qkv(s=700)), torch.arange(700).expand(2, -1) % 600
    found.inputs = [
        700 if isinstance(each, int) else positions if each.dim() == 2 else next(longer) for each in found.inputs
    ]
    check_near(found)


OTHERS: dict[str, tuple[Mask, str]] = {
    "half of the size": (lambda n: causal(n) & (torch.arange(n) < n // 2 + 3), "is not a plain tensor"),
    "as far back as it is long": (
        lambda n: torch.arange(n)[None, :] + n <= torch.arange(n)[:, None] + 6,
        "computes with an open size",
    ),
    "filled with the size": (
        lambda n: causal(n) & (torch.full((n, 1), n) < torch.arange(n)[None] + 200),
        "computes with an open size",
    ),
    "far away": (lambda n: torch.arange(n)[None, :] + 2**33 <= torch.arange(n)[:, None] + 2**33 + 1000, "too many"),
    "every other": (lambda n: causal(n) & (torch.arange(2 * n)[::2] < 30), "is not a plain tensor"),
    "by three numbers": (
        lambda n: causal(n) & (torch.arange(2)[:, None, None, None] + torch.arange(n)[:, None] > torch.arange(n) - 1),
        "takes another form",
    ),
    "from the end": (lambda n: (torch.arange(n) <= torch.arange(n)[-1:])[None] & causal(n), "from the end"),
    "the other way round": (lambda n: torch.arange(n).flip(0)[:, None] >= 0, "flip"),
    "chunks": (
        lambda n: causal(n) & (torch.arange(n)[None, :] // 64 == torch.arange(n)[:, None] // 64),
        "floor_divide",
    ),
    "distances of two kinds": (
        lambda n: causal(n) & ((torch.arange(n)[:, None] - torch.arange(n)).abs() <= torch.arange(n)),
        "of a distance and what is no constant",
    ),
    "the distance of a distance": (
        lambda n: causal(n) & (((torch.arange(n)[:, None] - torch.arange(n)).abs() - 3).abs() < 2),
        "takes another form",
    ),
    "counted in eight bits": (
        lambda n: torch.arange(n).to(torch.int8)[None, :] <= torch.arange(n).to(torch.int8)[:, None],
        "takes another form",
    ),
    "a constant that is doubled": (
        lambda n: causal(n) & (torch.arange(n) < doubled(30, 6)),
        "numbers that constants add up to, such as 1920",
    ),
    "a distance from a constant that is doubled": (
        lambda n: causal(n) & ((torch.arange(n)[:, None] - torch.arange(n)).abs() <= doubled(30, 6)),
        "numbers that constants add up to",
    ),
    "a constant many times": (
        lambda n: causal(n) & (torch.arange(n) < torch.add(torch.full((1,), 0), torch.full((1,), 100), alpha=100)),
        "numbers that constants add up to",
    ),
    "sums": (lambda n: causal(n) & (torch.ones(n, dtype=torch.int64).sum() < 7), "sum"),
    "counted": (lambda n: causal(n) & ((torch.arange(n) > 50).cumsum(0) == 0), "takes another form"),
    "products": (lambda n: torch.arange(n)[None, :] * 9 <= torch.arange(n)[:, None] * 9, "mul"),
    "larger than can be looked at": (lambda n: causal(n) & (torch.arange(n) < 100_000), "too many"),
    "not causal": (lambda n: causal(n) & (torch.arange(n) != 40), "is not causal"),
}


@pytest.mark.shows("H2")
@pytest.mark.parametrize("form", OTHERS)
def test_a_mask_that_is_another_at_another_size_is_kept(form: str) -> None:
    mask, reason = OTHERS[form]
    found = captured(mask)
    (kept,) = found.report.masked
    assert reason in kept.reason and not found.report.causal and not found.report.unmasked


NUMBERS = st.integers(min_value=-15, max_value=15)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """A causal mask, with comparisons of positions that are moved and turned: many of them hold for small sizes."""

    def positions(along: int) -> Mask:
        shift, turned = draw(NUMBERS), draw(st.integers(0, 3)) == 0
        view = ((-1, 1), (1, -1))[along]

        def made(n: Any) -> Tensor:
            found = torch.arange(n).view(view)
            return (-found if turned else found) + shift

        return made

    def comparison() -> Mask:
        compare = draw(st.sampled_from((torch.le, torch.lt, torch.ge, torch.ne)))
        if draw(st.integers(0, 2)) == 0:
            one, other, limit = positions(0), positions(draw(st.integers(0, 1))), abs(draw(NUMBERS))
            return lambda n: compare((one(n) - other(n)).abs(), limit)
        low, high = positions(draw(st.integers(0, 1))), positions(draw(st.integers(0, 1)))
        return lambda n: compare(low(n), high(n))

    parts = [(draw(st.booleans()), comparison()) for _ in range(draw(st.integers(0, 2)))]

    def mask(n: Any) -> Tensor:
        made = torch.arange(n)[None, :] <= torch.arange(n)[:, None]
        for both, part in parts:
            made = made & part(n) if both else made | part(n)
        return made

    return mask


def in_a_graph(mask: Mask) -> fx.GraphModule:
    """A mask of a size that is an input."""
    module = fx.symbolic_trace(mask)
    shapes = ShapeEnv()
    size = shapes.create_symintnode(shapes.create_symbol(TRACED, ConstantSource("n")), hint=TRACED)

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found = super().run_node(n)
            if n.op != "output":
                n.meta["example_value"] = found
            return found

    with FakeTensorMode(shape_env=shapes):
        Noting(module).run(size)
    return module


@pytest.mark.shows("H2")
@settings(max_examples=settings().max_examples // 2)
@given(masks())
def test_what_is_recognised_holds_at_every_size(mask: Mask) -> None:
    module = in_a_graph(mask)
    (made,) = module.graph.output_node().all_input_nodes
    try:
        found = match_range(made, [module.graph])
    except NotConstant:
        return
    for n in (1, 2, 3, 5, 17, 64, 131):
        window = n if found.window == found.length else min(found.window, n)
        ahead = n if found.ahead == found.length - 1 else found.ahead
        expected = torch.ones(n, n, dtype=torch.bool)
        assert torch.equal(mask(n), expected.tril(ahead) & ~expected.tril(-window)), n


@settings(max_examples=settings().max_examples // 5)
@given(NUMBERS, st.sampled_from((1, 2)))
def test_moved_positions_are_recognised(shift: int, times: int) -> None:
    def mask(n: Any) -> Tensor:
        keys, queries = torch.arange(n)[None, :], torch.arange(n)[:, None]
        for _ in range(times):
            keys, queries = keys + shift, queries + shift
        return keys <= queries

    module = in_a_graph(mask)
    (made,) = module.graph.output_node().all_input_nodes
    assert match_range(made, [module.graph]).causal
