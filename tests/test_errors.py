"""Wrong use is refused before any collective, on every rank, with what was found and what to do."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from tests.pool import Pool, RankError
from tests.toy import Mlp, OneLinear, Untraceable
from tests.training import llama, this_ranks_batch


class LeaksWeight(OneLinear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.linear.weight.t()


def build(model: nn.Module, **options: Any) -> fxshard.ShardedModule:
    return fxshard.compile(model, lowering="eager", **options)


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    **{f"zero={zero!r}": (Mlp, {"zero": zero}, "expected 0, 1, 2 or 3") for zero in (-1, 4, "3", None, True)},
    "no parameters": (nn.ReLU, {}, "no parameters"),
    "no module": (lambda: lambda x: x, {}, r"nn\.Module"),  # type: ignore[dict-item, return-value]
    "a pattern of nothing": (llama, {"units": ["nothing.*"]}, "matches no module"),
    "a unit twice": (llama, {"units": ["layers.*", "layers.0"]}, "already"),
    "two devices": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), {}, "2 devices"),
    "meta first": (lambda: nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4)), {}, "2 devices.*meta"),
    "lowering": (Mlp, {"lowering": "llvm"}, "lowering"),
    "debug": (Mlp, {"debug": 3}, "Debug"),
    "layout": (Mlp, {"layout": "x"}, "layout"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4)), {}, r"'0\.weight' has no shape yet"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_and_options_that_are_refused(case: str) -> None:
    make, options, message = REFUSED[case]
    with pytest.raises(fxshard.ConfigError, match=message):
        fxshard.compile(make(), **{"lowering": "eager", **options})


@pytest.mark.shows("S16")
def test_compiling_twice_or_with_gradients_in_flight() -> None:
    plain = Mlp()
    model = build(plain)
    with pytest.raises(fxshard.StateError, match="already"):
        build(model)
    with pytest.raises(fxshard.StateError, match="already"):
        build(plain)
    other = Mlp()
    other(torch.ones(2, 7)).sum().backward()
    with pytest.raises(fxshard.StateError, match="gradient in flight"):
        build(other)


def test_untraceable_forward() -> None:
    model = build(Untraceable())
    with pytest.raises(fxshard.CaptureError, match=r"Untraceable\.forward"):
        model(torch.ones(2, 4))


def test_complex_parameters() -> None:
    """They may be frozen."""
    linear = nn.Linear(4, 4, dtype=torch.complex64)
    with pytest.raises(fxshard.ConfigError, match="'weight' is complex"):
        build(linear)
    x = torch.ones(2, 4, dtype=torch.complex64)
    expected = linear(x)
    torch.testing.assert_close(build(linear.requires_grad_(False))(x), expected)


def test_sparse_buffers_cannot_be_broadcast() -> None:
    linear = nn.Linear(4, 4)
    linear.register_buffer("adjacent", torch.eye(4).to_sparse())
    with pytest.raises(fxshard.ConfigError, match=r"the buffer 'adjacent' is sparse.*fullgraph=False"):
        fxshard.plan(linear, (torch.ones(2, 4),), world_size=2)


def test_sparse_gradients() -> None:
    model = build(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)))
    with pytest.raises(fxshard.CaptureError, match="sparse=True"):
        model(torch.arange(3))
    with torch.no_grad():
        assert model(torch.arange(3)).shape == (3, 4)


class Solving(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(torch.eye(4), self.linear(x).mT)


def test_operators_with_side_effects() -> None:
    """torch 2.13 keeps their order by tokens, which are inputs of the graph ahead of the parameters; 2.11 does not."""
    plain, x = Solving(), torch.ones(2, 4)
    expected = plain(x)
    model = build(plain)
    if torch.__version__ < "2.13":
        torch.testing.assert_close(model(x), expected)
        return
    with pytest.raises(fxshard.CaptureError, match=r"forward calls torch\.linalg\.solve"):
        model(x)


class Clamping(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


@pytest.mark.parametrize("trains", [True, False])
def test_forward_that_changes_a_parameter(trains: bool) -> None:
    model = build(Clamping())
    with (
        torch.set_grad_enabled(trains),
        pytest.raises(fxshard.CaptureError, match=r"changes the parameter 'linear\.weight'"),
    ):
        model(torch.ones(2, 4))


def test_sharded_but_not_compiled() -> None:
    with pytest.raises(fxshard.StateError, match="not compiled"):
        fxshard.shard(Mlp())(torch.ones(2, 7))


def test_a_parameter_that_is_frozen_between_forward_and_backward() -> None:
    model, plain = build(Mlp(), optimizer=fxshard.AdamW()), Mlp()
    parameter = next(iter(model.parameters()))
    loss = model(torch.ones(2, 7), torch.ones(2, 5))
    parameter.requires_grad_(False)
    with pytest.raises(fxshard.StateError, match="was frozen between a forward and its backward"):
        loss.backward()
    parameter.requires_grad_(True)
    model.load_state_dict(plain.state_dict())
    for each in (model, plain):
        each(torch.ones(2, 7), torch.ones(2, 5)).backward()
    torch.testing.assert_close(parameter.grad, next(iter(plain.parameters())).grad)


def test_no_optimizer_no_schedule_no_moving_no_copying() -> None:
    model = build(Mlp())
    with pytest.raises(fxshard.StateError, match="optimizer"):
        _ = model.optimizer
    with pytest.raises(fxshard.StateError, match="schedule"):
        _ = model.schedule
    assert not hasattr(model, "schedule") and getattr(model, "optimizer", None) is None
    with pytest.raises(fxshard.StateError, match="cast"):
        model.half()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(fxshard.StateError, match="full_state_dict"):
            copied(model)


def test_wrong_state_dict_changes_nothing() -> None:
    model = build(Mlp())
    before = model.full_state_dict()
    wrong = {name: value + 1 for name, value in before.items()}
    name = next(iter(wrong))
    wrong[name] = torch.zeros(3, 3)
    with pytest.raises(fxshard.ConfigError, match=f"{name} has shape"):
        model.load_state_dict(wrong)
    del wrong[name]
    with pytest.raises(fxshard.ConfigError, match="missing keys"):
        model.load_state_dict(wrong)
    assert all(torch.equal(value, before[key]) for key, value in model.full_state_dict().items())


def leak() -> None:
    build(LeaksWeight(), zero=3)(torch.ones(2, 4))


def one_rank_has_another_zero() -> None:
    build(llama(), zero=3 if dist.get_rank() else 7)


def one_rank_has_another_model() -> None:
    build(Mlp(7, 13, 5) if dist.get_rank() else Mlp(7, 12, 5), zero=3)


def one_rank_cannot_trace() -> None:
    class Sometimes(Untraceable):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if dist.get_rank() == 1 else self.linear(x)

    build(Sometimes())(torch.ones(2, 4))


def too_large_a_mesh() -> None:
    class Mesh:
        ndim, device_type, mesh_dim_names = 1, "cpu", ("shard",)

        def size(self) -> int:
            return 8

        def get_group(self) -> Any:
            return dist.group.WORLD

    build(llama(), mesh=Mesh())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "types"),
    [
        (one_rank_has_another_zero, {0: "ConfigError", 1: "PeerError"}),
        (one_rank_has_another_model, {0: "RankDivergenceError", 1: "RankDivergenceError"}),
        (one_rank_cannot_trace, {0: "PeerError", 1: "CaptureError"}),
        (too_large_a_mesh, {0: "ConfigError", 1: "ConfigError"}),
        (leak, {0: "PassError", 1: "PassError"}),
    ],
)
def test_no_rank_hangs_because_another_raised(ranks: Pool, case: Any, types: dict[int, str]) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, case, timeout=60)
    assert caught.value.types == types


def unused_parameter() -> tuple[list[bool], list[float]]:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used = nn.Linear(8, 8)
            self.unused = nn.Linear(8, 8)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.frozen(self.used(x)) * self.scale).square().sum()

    found, scales = [], []
    for zero in (0, 3):
        model = build(Partly(), zero=zero, optimizer=fxshard.AdamW())
        model(torch.ones(2, 8)).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        found += [grads["unused.weight"] is None, grads["frozen.weight"] is None]
        found.append(bool(grads["scale"].to_local() != 0))
        frozen_buckets = [b for b in model._sharding.buckets if not b.plan.trainable]
        found.append(bool(frozen_buckets) and all(b.grad is None and b.grad_full is None for b in frozen_buckets))
        model.optimizer.step()
        scales.append(float(model.full_state_dict()["scale"]))
    return found, scales


@pytest.mark.shows("S7")
def test_parameters_without_gradient_have_none_and_frozen_ones_no_buffer(ranks: Pool) -> None:
    for found, scales in ranks(2, unused_parameter):
        assert all(found)
        assert len(set(scales)) == 1 and scales[0] != 2.0


def few_parameters() -> dict[str, list[float]]:
    """Two parameters on four ranks: some shards are empty."""
    losses: dict[str, list[float]] = {"rows": [], "whole": []}
    for layout, found in losses.items():
        torch.manual_seed(0)
        model = build(nn.Sequential(nn.Linear(6, 3)), zero=3, layout=layout, optimizer=fxshard.AdamW(lr=1e-1))
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            loss.backward()
            model.clip_grad_norm_(10.0)
            model.optimizer.step()
            model.optimizer.zero_grad()
            found.append(float(loss.detach()))
    return losses


@pytest.mark.shows("S8", "L9")
def test_a_rank_with_an_empty_shard_takes_part(ranks: Pool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-1, fused=True)
    expected = []
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = plain(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    for by_layout in ranks(4, few_parameters):
        for layout, losses in by_layout.items():
            assert losses == pytest.approx(expected, rel=1e-6), layout


def test_batches_differ_between_ranks(ranks: Pool) -> None:
    """The tests' own data: a comparison of equal batches would prove little."""
    first, second = ranks(2, this_ranks_batch, 0)
    assert not torch.equal(first[0], second[0])


def test_compile_and_shard_take_the_same_arguments() -> None:
    """``compile`` hands what it is given to ``shard`` by name: neither may have one, or a default, of its own."""
    taken = {call: inspect.signature(call).parameters for call in (fxshard.compile, fxshard.shard)}
    extra = {"fullgraph", "dynamic"}
    of_compile = [parameter for name, parameter in taken[fxshard.compile].items() if name not in extra]
    assert of_compile == list(taken[fxshard.shard].values())
