"""Experts one by one, or together in one tensor: each loads what the other saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.planner.stored_names import Source, find_sources
from tests.checkpoint.zoo import deliver, same
from tests.pool import Pool

EXPERTS, OUT, IN = 4, 6, 5


class OneByOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"experts": nn.ModuleList(Expert() for _ in range(EXPERTS))}) for _ in range(2)
        )
        self.out = nn.Linear(3, 3)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(IN, OUT, bias=False)
        self.gain = nn.Parameter(torch.randn(OUT))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, OUT, IN))
        self.gain = nn.Parameter(torch.randn(EXPERTS, OUT))


class Together(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": Grouped()}) for _ in range(2))
        self.out = nn.Linear(3, 3)


# By name: a rule by shape would treat a vector for each expert and the matrix of all of them differently.
CHOICE = fxshard.Muon(
    use=lambda name, shape: "w1" in name,
    adamw=fxshard.AdamW(lr=1e-2, weight_decay=0.1, decay=lambda name, shape: "bias" not in name),
)


def grouped(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of ``OneByOne`` as one of ``Together``."""
    found = {name: value for name, value in state.items() if "experts" not in name}
    for layer in range(2):
        for ours, theirs in (("w1", "w1.weight"), ("gain", "gain")):
            parts = [state[f"layers.{layer}.experts.{i}.{theirs}"] for i in range(EXPERTS)]
            found[f"layers.{layer}.experts.{ours}"] = torch.stack(parts)
    return found


def step(model: fxshard.ShardedModule, seed: int, one_by_one: bool) -> dict[str, torch.Tensor]:
    """A step with the same gradients in either layout; returns the parameters as ``Together`` has them."""
    generator = torch.Generator().manual_seed(seed)
    grads = {name: torch.randn(p.shape, generator=generator) for name, p in OneByOne().named_parameters()}
    deliver(model, grads if one_by_one else grouped(grads))
    model.optimizer.step()
    model.optimizer.zero_grad()
    full = model.full_state_dict()
    return grouped(full) if one_by_one else full


def both_directions(path: Path) -> list[str]:
    torch.manual_seed(dist.get_rank())
    options = {"optimizer": CHOICE, "zero": 3, "layout": "rows"}
    singles = fxshard.shard(OneByOne(), **options)
    step(singles, 1, True)
    fxshard.save(singles, path / "singles")
    together = fxshard.shard(Together(), **options)
    notes = fxshard.load(together, path / "singles").notes
    wrong = [] if "layers.0.experts.w1" in notes[0] else notes
    wrong += same(step(together, 2, False), step(singles, 2, True))
    fxshard.save(together, path / "together")
    back = fxshard.shard(OneByOne(), **options)
    fxshard.load(back, path / "together")
    wrong += same(back.full_state_dict(), singles.full_state_dict())
    return wrong + same(step(back, 3, True), step(together, 3, False))


@pytest.mark.shows("C3")
def test_model_and_optimizer_in_both_directions(ranks: Pool, tmp_path: Path) -> None:
    """Momentum, moments and step counts move too: the steps after are the same bit by bit."""
    assert ranks(3, both_directions, tmp_path) == [[]] * 3


def test_counts_that_differ_cannot_become_one(tmp_path: Path) -> None:
    singles = fxshard.shard(OneByOne(), optimizer=CHOICE)
    generator = torch.Generator().manual_seed(0)
    deliver(singles, {name: torch.randn(p.shape, generator=generator) for name, p in OneByOne().named_parameters()})
    singles.get_parameter("layers.1.experts.2.gain").grad = None  # an expert that nobody chose
    singles.optimizer.step()
    fxshard.save(singles, tmp_path / "a")
    with pytest.raises(fxshard.CheckpointError, match=r"layers.1.experts.gain: its parts made different numbers of"):
        fxshard.load(fxshard.shard(Together(), optimizer=CHOICE), tmp_path / "a")


# -- which belong together ---------------------------------------------------------------------------------------------


def singles(count: int, shape: tuple[int, ...] = (6, 5), name: str = "e.{}.w.weight") -> dict[str, tuple[int, ...]]:
    return {name.format(i): shape for i in range(count)}


@pytest.mark.shows("C3")
def test_ambiguous_and_incomplete_sets_are_left_alone() -> None:
    def problem(wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> str:
        found = find_sources({(name,): shape for name, shape in wanted.items()}, stored)
        assert not found.regrouped and found.unused == sorted(stored)
        return found.problems[0]

    together = {"e.w": (4, 6, 5)}
    assert "e.*.w.weight has numbers 0, 1, 2 where 0 to 3 are needed: left alone" in problem(together, singles(3))
    assert "has numbers 0, 1, 2, 3, 4 where" in problem(together, singles(5))
    assert "e.*.w.weight has other shapes than (6, 5)" in problem(together, singles(4, (5, 6)))
    two_ways = {**singles(4), **singles(4, name="e.w.{}")}
    assert "it could be e.0.w.weight and 3 more or e.w.0 and 3 more" in problem(together, two_ways)
    assert "e.w holds 4, the model misses 0, 1, 2" in problem(singles(3), together)
    assert "e.w has shape (4, 5, 6)" in problem(singles(4), {"e.w": (4, 5, 6)})
    both = {"e.w": (4, 6, 5), "e.w.weight": (4, 6, 5)}
    assert "it could be e.w or e.w.weight" in problem(singles(4), both)
    assert problem(together, {"other": (4, 6, 5)}) == "e.w is missing"


def test_layers_are_not_taken_for_experts() -> None:
    stored = {f"layers.{i}.e.{j}.w.weight": (6, 5) for i in range(2) for j in range(4)}
    found = find_sources({(f"layers.{i}.e.w",): (4, 6, 5) for i in range(2)}, stored)
    assert found.problems == found.unused == []
    assert found.of["layers.1.e.w"] == Source(tuple(f"layers.1.e.{j}.w.weight" for j in range(4)), stacked=True)
