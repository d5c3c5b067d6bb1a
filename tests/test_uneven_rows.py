"""What users do with sharded parameters outside of a model, where ranks hold uneven numbers of rows."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import fxshard
from tests.pool import Pool
from tests.training import deliver, random_gradients

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mean": lambda p: p.mean(),
    "mean of magnitudes": lambda p: p.abs().mean(),
    "maximum": lambda p: p.max(),
    "largest magnitude": lambda p: p.abs().amax(),
    "spread": lambda p: p.std(),
    "sum": lambda p: p.sum(),
    "sums of columns": lambda p: p.sum(0),
    "means of rows": lambda p: p.mean(1),
    "norm": lambda p: p.norm(),
    "largest norm": lambda p: torch.linalg.vector_norm(p, math.inf),
    "norms of rows": lambda p: torch.linalg.vector_norm(p, dim=1),
    "rank": lambda p: torch.linalg.matrix_rank(p),
    "product": lambda p: p @ torch.ones_like(p).pow(2).sum(0).mul(2),
    "zeros": lambda p: (p == 0).sum(),
    "finite": lambda p: p.isfinite().all(),
    "clamped": lambda p: p.clamp(-0.1, 0.1).mean(),
    "cosine": lambda p: (p * p.sign()).mean(),
}
ROWS = 7


class Narrow(nn.Module):
    """Two ranks cut the middle of its buckets, not of its matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, ROWS, bias=False), nn.Linear(ROWS, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


class Mixed(Narrow):
    """With a matrix that two ranks cut in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Embedding(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.even.weight.square().mean()


def trained(kind: type[nn.Module] = Narrow, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The model with gradients, sharded and plain."""
    torch.manual_seed(0)
    plain = kind()
    sharded = fxshard.shard(copy.deepcopy(plain), layout="rows", **options)
    plain(torch.arange(12.0).view(4, 3) / 12).backward()
    deliver(sharded, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    return sharded, plain


def read() -> dict[str, tuple[Any, Any]]:
    sharded, plain = trained(optimizer=fxshard.AdamW())
    found = {}
    with torch.no_grad():
        for (name, own), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            found[f"rows of {name}"] = len(own.to_local()), -(-len(own) // 2)
            for what, reads in READS.items():
                for kind, a, b in (("value", own, other), ("gradient", own.grad, other.grad)):
                    if a.ndim < 2 and ("row" in what or "col" in what or what in ("rank", "product")):
                        continue
                    got = reads(a)
                    got = got.full_tensor() if isinstance(got, DTensor) else got
                    found[f"{kind} of {name}: {what}"] = got, reads(b)
    return found


def test_reading_gives_what_the_whole_parameter_has(ranks: Pool) -> None:
    found = ranks(2, read)
    assert any(own != even for name, (own, even) in found[0].items() if name.startswith("rows")), "rows are uneven"
    for rank in found:
        for name, (got, expected) in rank.items():
            if isinstance(got, torch.Tensor):
                torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


def use(folder: Path) -> dict[str, Any]:
    sharded, plain = trained(optimizer=fxshard.AdamW())
    own, other = sharded.first.weight, plain.first.weight
    found: dict[str, Any] = {}
    with torch.no_grad():
        found["full"] = own.grad.full_tensor(), other.grad
        found["first row"] = own.grad.redistribute(placements=[torch.distributed.tensor.Replicate()]).to_local()[0]
        found["first row"] = found["first row"], other.grad[0]
        total = nn.utils.get_total_norm([p.grad for p in sharded.parameters()])
        found["norm"] = total.full_tensor(), nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        own.mul_(2).add_(own, alpha=0.5)
        own.clamp_(-0.5, 0.5)
        found["written"] = own.full_tensor(), (other * 3).clamp(-0.5, 0.5)
        file = io.BytesIO()
        torch.save(own.grad, file)
        file.seek(0)
        made = torch.optim.SGD([own], momentum=0.9), own.new_zeros(own.shape).add_(own), own.grad.clone()
        found["new"] = made[1].full_tensor(), own.full_tensor()
        made[0].step()
        state = made[0].state[own]["momentum_buffer"]
        found["state"] = state.full_tensor(), other.grad
        found["state's mean"] = state.mean().full_tensor(), other.grad.mean()
        dcp.save({"state": state, "copy": made[2]}, checkpoint_id=folder)
        there = {"state": torch.empty(ROWS, 3), "copy": torch.empty(ROWS, 3)}
        dcp.load(there, checkpoint_id=folder, no_dist=True)
        found["state in a checkpoint"] = there["state"], other.grad
        found["a copy in a checkpoint"] = there["copy"], other.grad
        dcp.async_save({"copy": made[2]}, checkpoint_id=folder / "async").result()
        dcp.load({"copy": there["copy"].zero_()}, checkpoint_id=folder / "async", no_dist=True)
        found["a copy, staged"] = there["copy"], other.grad
        found["saved"] = torch.load(file, weights_only=False).to_local(), own.grad.to_local()
    return found


def optimizers() -> dict[str, Any]:
    """Lists of parameters, some of them cut as torch would do it."""
    found = {}
    for name, options in (("fused", {"fused": True}), ("foreach", {"foreach": True}), ("plain", {"foreach": False})):
        sharded, plain = trained(Mixed, units=["first", "second", "even"])
        for model in (sharded, plain):
            torch.optim.AdamW(model.parameters(), lr=0.1, **options).step()  # type: ignore[arg-type]
        whole = sharded.full_state_dict()
        for key, value in plain.state_dict().items():
            found[f"{name} {key}"] = whole[key], value
    found["kinds"] = sorted({type(p).__name__ for p in sharded.parameters()})
    return found


def test_optimizers_of_torch_over_parameters_cut_in_both_ways(ranks: Pool) -> None:
    for rank in ranks(2, optimizers):
        assert rank.pop("kinds") == ["ShardedParameter", "UnevenParameter"]
        for name, (got, expected) in rank.items():
            torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_using_them_otherwise(ranks: Pool, tmp_path: Path) -> None:
    for rank in ranks(2, use, tmp_path):
        for name, (got, expected) in rank.items():
            torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda p: p.view(-1),
    "the transpose": lambda p: p.t(),
    "a row": lambda p: p[0].zero_(),
    "an update by columns": lambda p: p.mul_(p.sum(0)),
    "sorting in place": lambda p: p.copy_(p.full_tensor().sort().values),
}


def refused() -> dict[str, str]:
    sharded, _ = trained(optimizer=fxshard.AdamW())
    said = {}
    with torch.no_grad():
        for name, use in REFUSED.items():
            try:
                use(sharded.first.weight)
                said[name] = ""
            except (fxshard.FxshardError, RuntimeError) as error:
                said[name] = f"{type(error).__name__}: {error}"
    return said


def test_what_would_be_lost_is_refused_on_every_rank(ranks: Pool) -> None:
    first, second = ranks(2, refused)
    assert first == second
    for name, text in first.items():
        assert text, name
        if name != "sorting in place":  # torch's own error: a plain tensor meets a DTensor
            assert "uneven numbers of its rows" in text and "full_tensor()" in text, name


def loaded_from_files() -> dict[str, Any]:
    """What ``torch.save`` wrote on this rank, and DTensors that are cut as torch does it."""
    sharded, plain = trained()
    file = io.BytesIO()
    torch.save(sharded.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    mesh = sharded.first.weight.device_mesh
    as_torch_cuts = {
        name: torch.distributed.tensor.distribute_tensor(value * 2, mesh, [torch.distributed.tensor.Shard(0)])
        for name, value in plain.state_dict().items()
    }
    found = {}
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    for kind, state, times in (("saved", saved, 1), ("cut by torch", as_torch_cuts, 2)):
        sharded.load_state_dict(state)
        whole = sharded.full_state_dict()
        found.update({f"{kind} {name}": (whole[name], times * value) for name, value in plain.state_dict().items()})
    return found


def loaded_into_others() -> dict[str, Any]:
    """What ``torch.save`` wrote on this rank, in models that are cut in other ways."""
    sharded, _ = trained()
    file = io.BytesIO()
    torch.save(sharded.state_dict(), file)
    whole = sharded.full_state_dict()
    found = {}
    for kind, options in {"whole": {"layout": "whole"}, "zero=0": {"zero": 0}}.items():
        file.seek(0)
        other = fxshard.shard(Narrow(), **options)
        other.load_state_dict(torch.load(file, weights_only=True))
        found.update({f"{kind} {name}": (value, whole[name]) for name, value in other.full_state_dict().items()})
        file.seek(0)
        average = fxshard.EMA(other)
        average.load_state_dict({name: 2 * value for name, value in torch.load(file, weights_only=True).items()})
        averages = average.full_state_dict().items()
        found.update({f"EMA, {kind} {name}": (value, 2 * whole[name]) for name, value in averages})
    return found


def test_sharded_files_of_torch_are_loaded_where_rows_are_cut_in_another_way(ranks: Pool) -> None:
    for rank in ranks(2, loaded_into_others):
        for name, (got, expected) in rank.items():
            torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


class OneRow(nn.Module):
    """The rank that has the one row of the last matrix is another one in another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 3), nn.Linear(3, 5), nn.Linear(5, 1)


def step(model: fxshard.ShardedModule, optimizer: torch.optim.Optimizer, number: int) -> None:
    deliver(model, random_gradients(OneRow(), number))
    optimizer.step()
    optimizer.zero_grad()


def optimizer_state_in_others() -> dict[str, Any]:
    """Steps with state that ``torch.save`` wrote of uneven rows, in models that are cut in other ways. Loaded twice, as
    a run does that goes back: what is loaded is cut before the next step, whenever that is."""
    torch.manual_seed(0)
    model = fxshard.shard(OneRow(), layout="rows")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    for number in (1, 2):
        step(model, optimizer, number)
    found: dict[str, Any] = {}
    for kind, options in {"zero=0": {"zero": 0}, "rows": {"layout": "rows"}, "whole": {"layout": "whole"}}.items():
        other = fxshard.shard(OneRow(), **options)
        again = torch.optim.Adam(other.parameters(), lr=0.1)
        for _ in range(2):
            file.seek(0)
            parameters, state = torch.load(file, weights_only=True)
            other.load_state_dict(parameters)
            again.load_state_dict(state)
            for number in (1, 2):
                step(other, again, number)
        whole = other.full_state_dict()
        found.update({f"{kind} {name}": (whole[name], value) for name, value in model.full_state_dict().items()})
    return found


def test_optimizer_state_of_torch_files_is_cut_as_the_model_is(ranks: Pool) -> None:
    for found in ranks(2, optimizer_state_in_others):
        assert len(found) == 18
        for name, (got, expected) in found.items():
            torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


def talk_in_steps() -> list[int]:
    """How often ranks talk to each other in steps of an optimizer whose state was loaded before the second one."""
    model = fxshard.shard(OneRow(), layout="whole")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = []
    for number in range(4):
        deliver(model, random_gradients(OneRow(), number))
        with CommDebugMode() as talk:
            optimizer.step()
        found.append(talk.get_total_counts())
        if number == 0:
            optimizer.load_state_dict(optimizer.state_dict())
    return found


def test_ranks_ask_each_other_about_loaded_state_once(ranks: Pool) -> None:
    for before, after_loading, *others in ranks(2, talk_in_steps):
        assert after_loading > 0
        assert before == 0 and others == [0, 0]


def test_sharded_files_of_torch_are_loaded(ranks: Pool) -> None:
    for rank in ranks(2, loaded_from_files):
        for name, (got, expected) in rank.items():
            torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")
