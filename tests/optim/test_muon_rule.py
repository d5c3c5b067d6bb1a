"""Which parameters are Muon's, how they are cut, scaled and updated."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.optim import muon_rule as rule
from fxshard.optim.directions import in_turns

TINY = LlamaConfig(vocab=64, dim=32, layers=1, heads=2, hidden=48)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 8))
        self.bias = nn.Parameter(torch.randn(4, 16))


class Odd(nn.Module):
    """Names say nothing here, types do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.positions = nn.Embedding(64, 16)
        self.mix = nn.Conv1d(16, 16, 3)
        self.wide = nn.Linear(16, 64)
        self.narrow = nn.Linear(64, 16, bias=False)
        self.experts = Experts()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.decide = nn.Linear(16, 40, bias=False)


@pytest.mark.shows("O8")
def test_hidden_matrices_are_muons_and_nothing_else() -> None:
    assert list(rule.matrices(fxshard.Muon(), Llama(TINY))) == [
        "layers.0.attention.q.weight",
        "layers.0.attention.k.weight",
        "layers.0.attention.v.weight",
        "layers.0.attention.o.weight",
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.up.weight",
        "layers.0.mlp.down.weight",
    ]


@pytest.mark.shows("O8")
def test_types_are_asked_where_names_say_nothing() -> None:
    model = Odd()
    assert list(rule.matrices(fxshard.Muon(), model)) == ["wide.weight", "narrow.weight", "experts.up"]
    model.decide.weight = model.table.weight  # tied
    assert list(rule.matrices(fxshard.Muon(), model)) == ["wide.weight", "narrow.weight", "experts.up"]


@pytest.mark.shows("O8")
@pytest.mark.parametrize(
    ("name", "shape", "muon"),
    [
        ("layers.3.attention.q.weight", (64, 64), True),
        ("layers.3.moe.experts.down", (8, 64, 32), True),
        ("layers.3.moe.gate.weight", (8, 64), True),
        ("model.embed_tokens.weight", (512, 64), False),
        ("transformer.wpe.weight", (512, 64), False),
        ("lm_head.weight", (512, 64), False),
        ("output.weight", (512, 64), False),
        ("layers.3.attention.output.dense.weight", (64, 64), True),
        ("layers.3.norm.weight", (64,), False),
        ("layers.3.moe.up_bias", (8, 64), False),
        ("layers.3.gain", (1, 64), False),
        ("scalar", (), False),
    ],
)
def test_default_use_by_name_and_shape(name: str, shape: tuple[int, ...], muon: bool) -> None:
    assert rule.default_use(name, shape) is muon


@pytest.mark.shows("O8")
def test_a_predicate_overrides_the_default() -> None:
    choice = fxshard.Muon(use=lambda name, shape: name == "embed.weight")
    assert list(rule.matrices(choice, Llama(TINY))) == ["embed.weight"]
    with pytest.raises(fxshard.ConfigError, match=r"use\(\) selects 'norm.weight' of shape \[32\], which is no matrix"):
        rule.matrices(fxshard.Muon(use=lambda name, shape: "norm" in name and "layers" not in name), Llama(TINY))


SPLITS = [
    (fxshard.Split(3), (12, 5), [(4, 5)] * 3),
    (fxshard.Split((6, 3, 3)), (12, 5), [(6, 5), (3, 5), (3, 5)]),
    (fxshard.Split((4, 1, 1), groups=2), (12, 5), [(8, 5), (2, 5), (2, 5)]),
    (fxshard.Split((8, 2, 2), head_rows=2), (12, 5), [(4, 2, 5), (1, 2, 5), (1, 2, 5)]),
    (fxshard.Split((4, 1, 1), groups=2, head_rows=(4, 1, 1)), (12, 5), [(2, 4, 5), (2, 1, 5), (2, 1, 5)]),
    (fxshard.Split(2), (3, 12, 5), [(3, 6, 5)] * 2),
    (fxshard.Split(2, head_rows=3), (3, 12, 5), [(6, 3, 5)] * 2),
    (None, (12, 5), [(12, 5)]),
]


@pytest.mark.shows("O9")
@pytest.mark.parametrize(("split", "shape", "pieces"), SPLITS, ids=str)
def test_splits_cut_and_join(
    split: fxshard.Split | None, shape: tuple[int, ...], pieces: list[tuple[int, ...]]
) -> None:
    tensor = torch.randn(shape)
    cut = rule.split_matrices(tensor, split)
    assert [tuple(piece.shape) for piece in cut] == pieces
    assert torch.equal(rule.join_matrices(cut, split, shape), tensor)


@pytest.mark.shows("O9")
def test_groups_bring_the_rows_of_a_part_together() -> None:
    q, k, v = torch.randn(2, 4, 5), torch.randn(2, 1, 5), torch.randn(2, 1, 5)
    fused = torch.cat([q, k, v], dim=1).reshape(12, 5)
    for piece, part in zip(rule.split_matrices(fused, fxshard.Split((4, 1, 1), groups=2)), (q, k, v), strict=True):
        assert torch.equal(piece, part.reshape(-1, 5))


@given(
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    groups=st.integers(1, 3),
    experts=st.integers(0, 3),
    heads=st.booleans(),
)
def test_every_split_that_passes_the_check_loses_nothing(
    parts: list[int], groups: int, experts: int, heads: bool
) -> None:
    split = fxshard.Split(tuple(parts), groups, tuple(parts) if heads else None)
    shape = (*([experts] if experts else []), sum(parts) * groups, 3)
    rule.check_split("w", shape, split)
    tensor = torch.randn(shape)
    assert torch.equal(rule.join_matrices(rule.split_matrices(tensor, split), split, shape), tensor)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (5, r"'layers.0.attention.q.weight' of shape \[32, 32\] cannot be cut by .*: 32 rows are not 5 equal parts"),
        ((16, 8), "the parts have 24 rows together, not the 32 rows"),
        (fxshard.Split(1, groups=3), "32 rows are not 3 equal groups"),
        (fxshard.Split(2, head_rows=5), "a part of 16 rows is not made of heads of 5 rows"),
        (fxshard.Split(2, head_rows=(4,)), "1 numbers of head_rows for 2 parts"),
    ],
)
def test_a_split_that_does_not_divide(split: object, message: str) -> None:
    with pytest.raises(fxshard.ConfigError, match=message):
        rule.matrices(fxshard.Muon(split={"*.q.weight": split}), Llama(TINY))  # type: ignore[dict-item]


def test_a_split_pattern_must_match() -> None:
    with pytest.raises(fxshard.ConfigError, match=r"split pattern '\*.qkv.weight' matches none of Muon's parameters"):
        rule.matrices(fxshard.Muon(split={"*.qkv.weight": 3}), Llama(TINY))


@pytest.mark.shows("O12")
@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (5, 64, 16)])
def test_scale_rules(shape: tuple[int, ...]) -> None:
    out, inputs = shape[-2:]
    assert rule.scale_factor(shape, None) == 1
    assert rule.scale_factor(shape, "spectral") == math.sqrt(max(1, out / inputs))
    assert rule.scale_factor(shape, "rms") == 0.2 * math.sqrt(max(out, inputs))
    assert rule.scale_factor(shape, "ratio") == math.sqrt(out / inputs)


@pytest.mark.shows("O12")
def test_rms_scale_gives_the_size_of_an_adamw_update() -> None:
    """An orthogonal [m, n] matrix has root mean square 1/√max(m, n): the factor makes it 0.2."""
    orthogonal, _ = torch.linalg.qr(torch.randn(96, 32))
    assert (orthogonal * rule.scale_factor((96, 32), "rms")).square().mean().sqrt().item() == pytest.approx(0.2)


@pytest.mark.shows("O12")
def test_decay_uses_the_unscaled_rate() -> None:
    parameter, direction = torch.randn(4, 6), torch.randn(4, 6)
    before = parameter.clone()
    rule.apply_([parameter], [direction], 0.5, 0.1, [7.0])
    torch.testing.assert_close(parameter, before * (1 - 0.5 * 0.1) - 0.5 * 7.0 * direction)


def test_momentum_is_elementwise() -> None:
    """Shards of a flat gradient and momentum give what the whole gives, bit for bit."""
    whole, buffer = torch.randn(30), torch.randn(30)
    shards, buffers = [part.clone() for part in whole.split([7, 23])], [part.clone() for part in buffer.split([7, 23])]
    for nesterov in (True, False):
        expected = rule.momentum_([whole], [buffer], 0.9, nesterov)[0]
        assert torch.equal(torch.cat(rule.momentum_(shards, buffers, 0.9, nesterov)), expected)
        assert torch.equal(torch.cat(buffers), buffer)


def test_finite_means_every_element() -> None:
    fine = [torch.full((3,), 3e38), torch.zeros(2, 2)]
    assert rule.finite(fine).all() and rule.finite([]).all()
    for bad in (math.nan, math.inf, -math.inf):
        assert rule.finite([*fine, torch.tensor([1.0, bad])]).tolist() == [True] * len(fine) + [False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coefficients": "septic"}, "unknown coefficients 'septic'; known sets: quintic, cubic"),
        ({"steps": 0}, "steps=0: expected a number of Newton–Schulz steps"),
        ({"steps": 2.5}, r"steps=2\.5"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"scale": "width"}, "scale='width'.*: expected one of 'rms', 'spectral', 'ratio', None"),
        ({"form": "fast"}, "form='fast'"),
        ({"nan": "ignore"}, "nan='ignore'"),
        ({"adamw": 3e-4}, r"adamw=0\.0003.*: expected fxshard.AdamW"),
        ({"use": "layers"}, "use='layers'.*: expected a function"),
        ({"split": 3}, "split=3.*: expected 'auto', 'off', or a mapping"),
        ({"split": {"*": 0}}, "expected whole numbers above 0"),
        ({"split": {"*": ()}}, "expected whole numbers above 0"),
    ],
)
def test_bad_choices(options: dict[str, object], message: str) -> None:
    with pytest.raises(fxshard.ConfigError, match=message):
        fxshard.Muon(**options)  # type: ignore[arg-type]


def test_large_updates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is updated together is limited, and what a matrix becomes does not depend on the others."""
    results = []
    for most in (2**29, 700):
        monkeypatch.setattr("fxshard.optim.directions.MOST_NUMEL", most)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(20, 30), nn.Linear(30, 20), nn.Linear(20, 30)))
        optimizer = fxshard.Muon(lr=0.1, use=lambda name, shape: len(shape) == 2).build(model)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_turns_are_no_longer_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxshard.optim.directions.MOST_NUMEL", 10)
    values = [torch.empty(n) for n in (4, 6, 1, 30, 2)]
    assert list(in_turns([{}] * 5, values)) == [[0, 1], [2], [3], [4]]
