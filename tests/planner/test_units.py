"""Units: which parameters are gathered together, by default and by pattern."""

import pytest
import torch
from torch import nn

from fxshard._torch.errors import ConfigError
from fxshard.planner.units import Unit, UnitPatterns, find_units
from tests.toy import Block, Llama, Mlp


class Moe(nn.Module):
    """A router and a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class Layered(nn.Module):
    """Blocks that are themselves lists of experts, with parameters before, between and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.ModuleList(Moe() for _ in range(2))
        self.bridge = nn.Linear(4, 4)
        self.mid = nn.LayerNorm(4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)


def names(units: tuple[Unit, ...]) -> list[str]:
    return [unit.name for unit in units]


def everything_once(model: nn.Module, units: tuple[Unit, ...]) -> bool:
    listed = [param for unit in units for param in unit.params]
    return sorted(listed) == sorted(name for name, _ in model.named_parameters())


def test_each_block_of_a_list_is_a_unit_and_leftovers_are_stretches() -> None:
    model = Llama(layers=2)
    units = find_units(model)
    assert names(units) == ["emb", "layers.0", "layers.1", "norm+head"]
    assert everything_once(model, units)
    block = [name for name, _ in Block(8, 2, 8).named_parameters()]
    assert units[1].params == tuple(f"layers.0.{name}" for name in block)
    assert units[3].params == ("norm.weight", "head.weight")


def test_the_outermost_list_makes_the_units() -> None:
    model = Layered()
    units = find_units(model)
    assert names(units) == ["scale", "first.0", "first.1", "bridge+mid", "second.0", "second.1", "head"]
    assert everything_once(model, units)
    assert "first.0.experts.1.bias" in units[1].params


NAMES: dict[str, tuple[nn.Module, list[str]]] = {
    "a block alone is no repetition, its experts are": (
        nn.ModuleList([Moe()]),
        ["0.router", "0.experts.0", "0.experts.1"],
    ),
    "different modules": (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)), ["0+1+2"]),
    "modules without parameters are no blocks": (Mlp(3, 4, 5), ["net.0", "net.2"]),
    "one with parameters": (nn.Sequential(nn.Linear(2, 2), nn.Tanh()), ["0"]),
    "a long stretch is named by its ends": (
        nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Embedding(2, 2), nn.Bilinear(2, 2, 2)),
        ["0…3"],
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_of_units(case: str) -> None:
    model, expected = NAMES[case]
    assert names(find_units(model)) == expected


@pytest.mark.shows("L5")
def test_a_tied_weight_is_in_the_unit_that_names_it_first_and_nowhere_else() -> None:
    model = Llama(layers=2, tied=True)
    units = find_units(model)
    assert names(units) == ["emb", "layers.0", "layers.1", "norm"]
    assert [unit.name for unit in units if {"emb.weight", "head.weight"} & set(unit.params)] == ["emb"]


@pytest.mark.shows("L5")
def test_a_block_used_twice_is_one_unit() -> None:
    block = nn.Linear(3, 3)
    units = find_units(
        nn.ModuleDict({"a": nn.ModuleList([block, nn.Linear(3, 3)]), "b": nn.ModuleList([block, block])})
    )
    assert [(unit.name, len(unit.params)) for unit in units] == [("a.0", 2), ("a.1", 2)]


@pytest.mark.parametrize(
    "patterns, expected",
    [
        (["layers.*"], ["emb", "layers.0", "layers.1", "layers.2", "norm+head"]),
        (["layers.1"], ["emb…layers.0.mlp.w2", "layers.1", "layers.2.norm1…head"]),
        ([("emb", "head")], ["emb+head", "layers.0.norm1…norm"]),
        ([("layers.0", "layers.[12]"), "head"], ["emb", "layers.0+layers.1+layers.2", "norm", "head"]),
        ([], ["emb…head"]),
    ],
    ids=str,
)
def test_patterns_make_units(patterns: UnitPatterns, expected: list[str]) -> None:
    model = Llama(layers=3)
    units = find_units(model, patterns)
    assert names(units) == expected
    assert everything_once(model, units)


def test_a_star_does_not_cross_a_dot() -> None:
    units = find_units(Llama(layers=2), ["layers.*.mlp"])
    assert [name for name in names(units) if name.endswith("mlp")] == ["layers.0.mlp", "layers.1.mlp"]
    assert {unit.name: len(unit.params) for unit in units}["layers.0.mlp"] == 3


def test_a_tuple_of_patterns_is_one_unit_at_the_place_of_its_first_parameter() -> None:
    units = find_units(Llama(layers=2), [("norm", "layers.1"), "layers.0"])
    assert names(units) == ["emb", "layers.0", "norm+layers.1", "head"]
    assert units[2].params[0].startswith("layers.1.") and units[2].params[-1] == "norm.weight"


@pytest.mark.parametrize(
    "patterns, message",
    [
        (["blocks.*"], r"'blocks\.\*' matches no module.*emb, layers"),
        (["layers.*", "heads"], "'heads' matches no module"),
        ([("emb", "nope")], "'nope' matches no module"),
        (
            ["layers.*", "layers.0"],
            r"'layers\.0' \(pattern 'layers\.0'\) is a unit by the pattern 'layers\.\*' already",
        ),
        ([("emb", "emb")], "'emb' .*already"),
    ],
    ids=str,
)
def test_patterns_that_cannot_work_are_refused(patterns: UnitPatterns, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_units(Llama(layers=2), patterns)


def test_a_unit_within_a_unit_has_its_parameters() -> None:
    model = Llama(layers=2)
    units = find_units(model, ["layers.1.mlp", "layers", "layers.1.mlp.w2"])
    assert everything_once(model, units)
    held = {unit.name: unit.params for unit in units}
    assert held["layers.1.mlp"] == ("layers.1.mlp.w1.weight", "layers.1.mlp.w3.weight")
    assert held["layers.1.mlp.w2"] == ("layers.1.mlp.w2.weight",)
    assert all(not name.startswith("layers.1.mlp") for name in held["layers"]) and len(held["layers"]) == 15


def test_names_that_only_begin_alike_do_not_overlap() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2)})
    assert names(find_units(model, ["a", "ab"])) == ["a", "ab"]


def test_a_numbered_dictionary_is_a_list_of_blocks() -> None:
    """As torchtitan keeps its layers; one with names of another kind is no repetition."""
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(3)})
    model.heads = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("policy", "value")})
    assert [unit.name for unit in find_units(model)] == ["layers.0", "layers.1", "layers.2", "heads.policy+heads.value"]
