"""Graph breaks: refused with the place by default; with ``fullgraph=False`` several graphs, and code between them."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxshard
from tests.pool import Pool
from tests.thorough import thorough
from tests.toy import Linears, OneLinear
from tests.training import EPS, full_gradients, train_step

LOG = logging.getLogger(__name__)


@torch.compiler.disable
def untraced(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reads a parameter without any view of it, which would read freed memory if nobody looked."""
    return x * weight.sum() + F.linear(x, weight)


class Broken(nn.Module):
    """Two breaks; one unit spans all three graphs, and code between them reads a parameter."""

    def __init__(self, reads: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.eager = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(8))
        self.third = nn.Linear(8, 4)
        self.forgotten = nn.Linear(2, 2)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        torch._dynamo.graph_break()
        x = torch.tanh(self.second(x))
        x = untraced(self.eager.weight, x) if self.reads else x
        torch._dynamo.graph_break()
        return self.third(x * self.scale).square().mean()


class Breaks(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        print("a break")
        return x.sum()


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def broken_steps(zero: int) -> dict[str, object]:
    """Three steps, an evaluation in between and a second forward before one backward, beside plain PyTorch."""
    world = dist.get_world_size()
    model = fxshard.compile(
        Broken(),
        zero=zero,
        units=["first", "second"],
        optimizer=fxshard.AdamW(lr=1e-2, eps=EPS),
        fullgraph=False,
        lowering="eager",
    )
    plain = Broken()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS)
    losses: list[tuple[float, float]] = []
    worst = 0.0
    for step in range(3):
        with torch.no_grad():
            losses.append((float(model(inputs(7, 0))), float(plain(inputs(7, 0)))))
        mine = model(inputs(step, dist.get_rank()))
        theirs = sum(plain(inputs(step, rank)) for rank in range(world)) / world
        if step == 1:
            mine = mine + model(inputs(5, dist.get_rank()))
            theirs = theirs + sum(plain(inputs(5, rank)) for rank in range(world)) / world
        mine.backward()
        theirs.backward()
        found = full_gradients(model)
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                worst = max(worst, float((found[name] - parameter.grad).abs().max()))
        model.optimizer.step()
        model.optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    same = all(
        torch.allclose(value, model.full_state_dict()[name], rtol=1e-5, atol=1e-6)
        for name, value in plain.state_dict().items()
        if "forgotten" not in name
    )
    refused = ""
    with torch.no_grad():
        model(inputs(0, 0))
        for parameter in model.parameters():
            parameter.data.mul_(2)
        try:
            model(inputs(0, 0))
        except fxshard.StateError as error:
            refused = str(error)
    return {
        "refused": refused,
        "losses": losses,
        "worst": worst,
        "breaks": model.report.graph_breaks,
        "reads": model.report.eager_reads,
        "unused": model.report.unused_parameters,
        "graphs": len(model.emitted),
        "same": same,
    }


@pytest.mark.shows("S17")
@pytest.mark.parametrize("zero", [thorough(1), 3])
def test_several_graphs_and_code_between_them(ranks: Pool, zero: int) -> None:
    for found in ranks(2, broken_steps, zero):
        assert found["losses"] == [pytest.approx(pair[::-1], rel=1e-5) for pair in found["losses"]]
        assert found["worst"] < 1e-6
        assert found["same"]
        assert "eager" in found["refused"] and "parameters_changed()" in found["refused"]  # what it read is not current
        assert found["graphs"] == 6  # three to train with, three to evaluate with
        assert any("test_breaks.py" in broken for broken in found["breaks"])
        assert set(found["reads"]) == {"eager.weight"} and "test_breaks.py" in found["reads"]["eager.weight"]
        assert found["unused"] == ["forgotten.weight", "forgotten.bias"]


@pytest.mark.shows("S17")
def test_a_break_is_refused_with_its_place() -> None:
    with pytest.raises(fxshard.CaptureError, match=r"test_breaks\.py.*line \d+(?s:.)*fullgraph=False"):
        fxshard.compile(Breaks(), lowering="eager")(torch.ones(2, 4))
    sharded = fxshard.shard(Breaks(), lowering="eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"test_breaks\.py.*line \d+"):
        torch.compile(sharded, backend="fxshard")(torch.ones(2, 4))


class BreaksFirst(OneLinear):
    """Ahead of the first graph: Dynamo calls no backend for a graph that is empty."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return untraced(self.linear.weight, x) + self.linear(x)


class Talkative(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOG.warning("the mean is %s", x)
        LOG.info("and so on")
        return self.linear(x).sum()


class Ragged(OneLinear):
    """Sizes of parts are read from a tensor, as the vision towers of Qwen2-VL have them, and a part is asked about."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, lengths.tolist())
        return torch.cat([self.linear(part) if part.numel() else part for part in parts]).square().mean()


def test_sizes_that_are_read_from_data_are_refused_or_break_the_graph() -> None:
    x, lengths = torch.randn(5, 4), torch.tensor([2, 3])
    with pytest.raises(fxshard.CaptureError, match=r"Ragged\.forward(?s:.)*fullgraph=False"):
        fxshard.compile(Ragged(), lowering="eager")(x, lengths)
    plain, several = Ragged(), fxshard.compile(Ragged(), lowering="eager", fullgraph=False)
    losses = [model(x, lengths) for model in (plain, several)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert torch.equal(full_gradients(several)["linear.weight"], plain.linear.weight.grad)


class Graph(nn.Module):
    """A sparse tensor, made of values that train and of none, outside of the graphs: Dynamo traces neither."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weights = nn.Linear(4, 4), nn.Parameter(torch.randn(3))
        self.register_buffer("edges", torch.tensor([[0, 1, 2], [3, 0, 1]]))
        self.register_buffer("mask", torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adjacent = torch.sparse_coo_tensor(self.edges, self.weights, (4, 4), check_invariants=True)
        return torch.sparse.mm(self.mask, torch.sparse.mm(adjacent, self.linear(x))).square().mean()


def test_sparse_tensors_between_graphs() -> None:
    x = torch.randn(4, 4)
    plain, several = Graph(), fxshard.compile(Graph(), lowering="eager", fullgraph=False)
    losses = [model(x) for model in (plain, several)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    gradients = full_gradients(several)
    assert all(torch.equal(gradients[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)
    assert len(gradients) == 3


@pytest.mark.shows("H5")
def test_logging_breaks_no_graph_of_ours_and_those_of_others_as_before() -> None:
    model = fxshard.compile(Talkative(), lowering="eager")
    x = torch.ones(2, 4)
    model(x).backward()
    assert model.report.compilations.captures == 1
    with pytest.raises(Exception, match="Logger"):
        torch.compile(Talkative(), backend="eager", fullgraph=True)(x)


def test_a_break_ahead_of_the_first_graph_is_refused() -> None:
    step = torch.compile(fxshard.shard(BreaksFirst(), lowering="eager"), backend="fxshard")
    for _ in range(2):  # and again, when Dynamo knows the function already
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"test_breaks\.py.*line \d+"):
            step(torch.ones(2, 4))


def at_address(weight: torch.Tensor) -> torch.Tensor:
    """What an extension reads: no operation of torch's has a part in it."""
    return torch.tensor((ctypes.c_float * weight.numel()).from_address(weight.data_ptr())[:]).view(weight.shape)


class Product(torch.autograd.Function):
    """``x · weightᵀ`` by an extension, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ at_address(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ at_address(weight), grad.t() @ x


def left_alone(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As Transformer Engine's decorator does it."""
    disabled = torch.compiler.disable(forward)

    @functools.wraps(forward)
    def wrapper(*args: Any) -> torch.Tensor:
        return disabled(*args)

    return wrapper


class LayerNormMLP(nn.Module):
    """A stand-in for Transformer Engine's module of that name, whose ``forward`` Dynamo is told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1_weight, self.fc2_weight = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 16))

    @left_alone
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(F.gelu(Product.apply(x, self.fc1_weight)), self.fc2_weight)


class WithModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mlp, self.last = nn.Linear(8, 8), LayerNormMLP(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.mlp(self.first(x))).square().mean()


def test_a_module_that_is_left_alone_is_refused_by_name() -> None:
    with pytest.raises(fxshard.CaptureError, match=r"LayerNormMLP\.forward(?s:.)*fullgraph=False"):
        fxshard.compile(WithModule(), lowering="eager")(torch.randn(4, 8))


def steps_of_an_extension(zero: int) -> dict[str, Any]:
    plain, rank = WithModule(), dist.get_rank()
    model = fxshard.compile(WithModule(), zero=zero, lowering="eager", fullgraph=False, optimizer=fxshard.AdamW(lr=0.1))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for number in range(3):
        torch.stack([plain(inputs(number, other)) for other in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        train_step(model, inputs(number, rank))
    pairs = zip(plain.state_dict().values(), model.full_state_dict().values(), strict=True)
    return {
        "same": all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs),
        "reads": model.report.eager_reads,
        "unused": model.report.unused_parameters,
    }


@pytest.mark.parametrize("zero", [thorough(1), 3])
def test_parameters_of_a_module_that_is_left_alone_are_there(ranks: Pool, zero: int) -> None:
    """What its extensions read, and when, is not seen: all of them are gathered before each forward."""
    for found in ranks(2, steps_of_an_extension, zero):
        assert found["same"] and not found["unused"]
        where = "LayerNormMLP.forward, which Dynamo leaves alone"
        assert found["reads"] == {"mlp.fc1_weight": where, "mlp.fc2_weight": where}


def test_an_extension_in_a_module_that_is_not() -> None:
    class Traced(LayerNormMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.compiler.disable(super().forward)(x)

    def built() -> WithModule:
        model = WithModule()
        model.mlp = Traced()
        model.mlp.load_state_dict(plain.mlp.state_dict())
        return model

    plain, x = WithModule(), torch.randn(4, 8)
    with pytest.raises(fxshard.StateError, match=r"Traced 'mlp' \(.*test_breaks\.py:\d+\).*torch\.compiler\.disable"):
        fxshard.compile(built(), lowering="eager", fullgraph=False)(x)
    told = built()
    told.mlp.forward = torch.compiler.disable(told.mlp.forward)  # type: ignore[method-assign]
    torch.testing.assert_close(fxshard.compile(told, lowering="eager", fullgraph=False)(x), plain(x))


@torch.compiler.disable
def sneaky(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * weight.data.sum() + x * weight.detach().t().sum()


@pytest.mark.shows("S17")
def test_a_read_through_data_is_seen_and_one_of_unknown_memory_refused() -> None:
    class Sneaky(Broken):
        alias: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sneaky(self.eager.weight if self.alias is None else self.alias, self.first(x))

    plain = Sneaky()
    model = fxshard.compile(Sneaky(), fullgraph=False, lowering="eager")
    x = torch.ones(2, 8)
    torch.testing.assert_close(model(x), plain(x))
    inner = Sneaky()
    model = fxshard.compile(inner, fullgraph=False, lowering="eager")
    inner.alias = inner.second.weight.data
    with pytest.raises(fxshard.StateError, match=r"test_breaks\.py:\d+: .*\.data"):
        model(x)


@torch.compiler.disable
def halve(weight: torch.Tensor, through_data: bool) -> None:
    with torch.no_grad():
        (weight.data if through_data else weight).mul_(0.5)


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("through_data", [False, True])
def test_a_write_between_graphs_is_refused(read_before: bool, through_data: bool) -> None:
    """It would change a gathered copy, and be lost."""

    class Halving(Broken):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = sneaky(self.eager.weight, self.first(x)) if read_before else self.first(x)
            halve(self.eager.weight, through_data)
            return self.second(x)

    model = fxshard.compile(Halving(), fullgraph=False, lowering="eager")
    with pytest.raises(fxshard.StateError, match=r"test_breaks\.py:\d+: mul_ changes '"):
        model(torch.ones(2, 8))


class TwoWays(Linears):
    """The same layers in either order: two plans with other places for the same buckets."""

    def forward(self, x: torch.Tensor, back: bool) -> torch.Tensor:
        for layer in reversed(self.layers) if back else self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def plans_in_flight() -> list[bool]:
    """The first plan's backward runs while the second has kept buckets in the first's places."""
    model, plain = fxshard.compile(TwoWays(4), lowering="eager"), TwoWays(4)
    x = inputs(0, 0)
    losses = [model(x, back) for back in (False, True)]
    for loss in losses:
        loss.backward()
    for back in (False, True):
        plain(x, back).backward()
    found = full_gradients(model)
    return [torch.allclose(found[name], p.grad, rtol=1e-4, atol=1e-7) for name, p in plain.named_parameters()]


def test_two_plans_in_flight(ranks: Pool) -> None:
    for same in ranks(2, plans_in_flight):
        assert all(same)


class Repeated(nn.Module):
    """A block with a break inside: Dynamo captures it once and calls it again with the next block's parameters."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.outer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.inner(x))
            torch._dynamo.graph_break()
            return torch.tanh(self.outer(x))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Repeated.Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def repeated(lowering: str) -> tuple[bool, int, int]:
    model = fxshard.compile(Repeated(), fullgraph=False, lowering=lowering)
    plain = Repeated()
    x = inputs(0, 0)
    loss, expected = model(x), plain(x)
    loss.backward()
    expected.backward()
    found = full_gradients(model)
    same = [torch.allclose(loss, expected, rtol=1e-5)]
    same += [torch.allclose(found[name], p.grad, rtol=1e-4, atol=1e-7) for name, p in plain.named_parameters()]
    with torch.no_grad():
        same.append(torch.allclose(model(x), expected, rtol=1e-5))
    return all(same), len(model.report.eager_reads), len(model.report.unused_parameters)


@pytest.mark.thorough
@pytest.mark.shows("S17")
def test_a_graph_that_is_called_with_other_parameters(ranks: Pool) -> None:
    for same, eager, unused in ranks(2, repeated, "eager"):
        assert same
        assert eager == unused == 0
