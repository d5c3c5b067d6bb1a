"""Compiling with repeated layers traced once gives the graphs, the schedule and the bits of tracing all of them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxshard
from fxshard import _compat, backend
from fxshard.repetition import abridged, expansion
from fxshard.repetition.numbering import Numbering
from fxshard.repetition.periods import Unrepeatable, described, references
from tests.toy import Llama, batch

STEPS = 2


class Mixed(nn.Module):
    """Layers with a buffer of their own and dropout; the loss comes with something that has no gradient."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        for i, layer in enumerate(self.layers):
            layer.register_buffer("shift", torch.full((8,), 1.0 + i))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = F.dropout(layer(x).tanh() + layer.shift, 0.5)
        return x.square().mean(), x.detach().argmax(-1)


class Counts(nn.Module):
    """Layers that write to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


class Hidden(nn.Module):
    """A model that returns something of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden = []
        for layer in self.layers:
            x = layer(x).tanh()
            hidden.append(x)
        return x.square().mean(), hidden


class Inplace(nn.Module):
    """Layers that write to what they have made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y.mul_(2)
            x = y.tanh()
        return x.square().mean()


class Shared(nn.Module):
    """A parameter that all layers use: its gradients are added up from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * self.scale
        return x.square().mean()


class Residual(nn.Module):
    """Layers beside a stream that they add to: the last one's gradient is no sum of two, as the others' are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(6))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.norm(x).square().mean()


class FirstAgain(nn.Module):
    """The first layer is used once more behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return (x + self.layers[0](x).tanh()).square().mean()


class ShortFirst(nn.Module):
    """A first layer of one operation: inputs stand near the others. What the last returns is the model's result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + torch.tanh(torch.sin(torch.cos(layer(x)) * 0.3) + 1.5) if i else x * layer.bias
        return x


def small(step: int) -> tuple[Tensor]:
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(step)),)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    return batch(step, 1, 0, 96, size=2)


def trained(make: Any, inputs: Any, *, once: bool, **options: Any) -> tuple[Any, list[Any], fxshard.ShardedModule]:
    """What two steps leave behind, for each capture whether it was abridged, and the model."""
    found = []

    def spy(*args: Any) -> abridged.Abridged | None:
        found.append(abridged.abridge(*args))
        return found[-1]

    torch.manual_seed(0)
    model = fxshard.compile(make(), optimizer=fxshard.AdamW(lr=1e-2), trace_once=once, **options)
    left: list[Tensor] = []
    with mock.patch.object(backend, "abridge", spy):
        for step in range(STEPS):
            result = model(*inputs(step))
            (result if isinstance(result, Tensor) else result[0]).sum().backward()
            left += [value.detach() for value in torch.utils._pytree.tree_leaves(result)]
            left += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            model.optimizer.step()
            model.optimizer.zero_grad()
    left += model.full_state_dict().values()
    return left, [one is not None for one in found], model


def same(make: Any, inputs: Any, **options: Any) -> list[bool]:
    """Check that both ways leave the same behind; returns which captures were abridged."""
    short, taken, one = trained(make, inputs, once=True, **options)
    whole, none, other = trained(make, inputs, once=False, **options)
    assert not none
    assert all(torch.equal(a, b) for a, b in zip(short, whole, strict=True))
    assert one.schedule == other.schedule
    assert dataclasses.replace(one.compilations, layers_left_out=0, layers_passed_by=0) == other.compilations
    assert (one.compilations.layers_left_out > 0) == any(taken)
    for phase in ("forward", "backward"):
        assert str(one.graphs[phase].graph) == str(other.graphs[phase].graph)
    return taken


@pytest.mark.shows("P2", "S2")
@pytest.mark.thorough
def test_a_llama() -> None:
    assert same(lambda: Llama(layers=7), tokens, lowering="eager") == [True]


@pytest.mark.thorough
def test_a_llama_through_inductor() -> None:
    assert same(lambda: Llama(layers=6), tokens, lowering="inductor") == [True]


@pytest.mark.shows("S18")
def test_buffers_randomness_and_a_result_without_gradient() -> None:
    assert same(Mixed, small, lowering="eager") == [True]


@pytest.mark.thorough
def test_random_numbers_through_inductor() -> None:
    """It gives each its own place in a table of seeds, which does not repeat from layer to layer."""
    assert same(Mixed, small, lowering="inductor") == [True]


@pytest.mark.parametrize("make", [Inplace, Shared, Residual, FirstAgain, ShortFirst])
def test_layers_that_write_in_place_share_a_parameter_or_add_to_a_stream(make: Any) -> None:
    assert same(make, small, lowering="eager") == [True]


@pytest.mark.parametrize("make", [Counts, Hidden])
def test_what_cannot_be_told_from_four_layers_is_traced_whole(make: Any) -> None:
    assert same(make, small, lowering="eager") == [False]


def partitioned(make: Any, inputs: Any, **options: Any) -> tuple[list[int], int]:
    """How many inputs the model had each time that the partitioner was asked; how many layers were not traced."""
    seen: list[int] = []
    original = _compat.min_cut_partition

    def spy(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        seen.append(sum(node.name.startswith("primals") for node in joint.graph.find_nodes(op="placeholder")))
        return original(joint, *args, **kwargs)

    model = fxshard.compile(make(), lowering="eager", **options)
    with mock.patch.object(_compat, "min_cut_partition", spy):
        model(*inputs(0)).backward()
    return seen, model.compilations.layers_left_out


def test_the_partitioner_is_asked_about_four_layers() -> None:
    assert partitioned(Inplace, small) == ([4 * 2 + 1], 2)


def test_passes_of_the_users_own_see_all_layers() -> None:
    """They may do something to one of them."""
    assert partitioned(Inplace, small, passes=fxshard.PASSES) == ([6 * 2 + 1], 2)


@pytest.mark.thorough
def test_where_four_layers_do_not_tell_it_is_asked_about_all() -> None:
    """What forward keeps of attention is made behind all layers here, in one piece."""
    seen, left_out = partitioned(lambda: Llama(layers=7), tokens)
    assert len(seen) == 2 and seen[0] < seen[1] and left_out == 3


@pytest.mark.parametrize(
    ("name", "shift", "expected"),
    [
        ("mm", 0, "mm"),  # the first layer's
        ("mm", 5, "mm_10"),  # two in each layer of forward
        ("mm_9", 6, "mm_21"),  # four in each of backward, behind all of forward: six layers were left out
        ("mm_9", 5, "mm_25"),
        ("full_2", 6, "full_2"),  # made by a pass that went from the last layer to the first
        ("full_2", 0, "full_8"),
        ("view_3", 2, "view_3"),  # of none of the layers
        ("again_mm", 5, "again_mm_10"),  # of forward, computed again
        ("again_for_all_mm", 5, "again_for_all_mm"),  # the first layer's, for all
    ],
)
def test_names_are_numbered_as_if_all_were_traced(name: str, shift: int, expected: str) -> None:
    forward = {"mm", "mm_1", "full_2"}
    numbering = Numbering({"mm": (2, 4), "full": (-1, 0)}, forward, forward, removed=6)
    assert numbering.name(name, shift) == expected


def test_other_batch_sizes_and_evaluation() -> None:
    """The second size is captured with symbolic sizes, evaluation without backward: both trace everything."""
    torch.manual_seed(0)
    plain = Inplace()
    model = fxshard.compile(copy.deepcopy(plain), lowering="eager")
    for size in (4, 6, 5):
        x = torch.randn(size, 8)
        ours, theirs = model(x), plain(x)
        ours.backward()
        theirs.backward()
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        assert torch.equal(ours, theirs)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def expanding(make: Any) -> expansion._Expansion:
    """A joint graph of four layers, about to be expanded."""
    caught: list[tuple[expansion.Shortened, Any]] = []

    def catch(short: expansion.Shortened, joint: Any) -> Any:
        caught.append((short, joint))
        raise Unrepeatable

    with mock.patch.object(expansion.Shortened, "expand", catch):
        fxshard.compile(make(), lowering="eager")(*small(0))
    ((short, joint),) = caught
    with mock.patch.object(expansion._Expansion, "build", lambda self: self):
        return short.expand(joint)  # type: ignore[return-value]


def test_the_last_layer_may_differ_only_in_what_the_others_get_from_each_other() -> None:
    """Layers that all refer to one node behind them, and the last to another: no copy of a layer has such a node."""
    found = expanding(Residual)
    line, (_, first, second, last) = found.line, found.g
    offsets = [i for i in range(line.bw_period) if not line.alike(line.nodes[second + i], line.nodes[last + i])]
    assert offsets and found._backward_repeats()
    before, low, high = (line.nodes[layer + offsets[0]] for layer in (first, second, last))
    ((i, theirs),) = [
        (i, b)
        for i, (a, b) in enumerate(zip(references(low), references(high), strict=True))
        if line.moves(a, b) is None
    ]
    kind = described(theirs.meta["val"])
    behind = [node for node in line.nodes[line.boundary : last] if described(node.meta.get("val")) == kind]
    other = next(node for node in behind if node is not theirs)
    for node in (before, low):
        node.replace_input_with(references(node)[i], other)
    assert not found._backward_repeats()


def attention(dropout: float) -> Any:
    return lambda x, w: F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)


def tiled_attention(dropout: float) -> Any:
    return lambda x, w: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, dropout)


@pytest.mark.parametrize(
    ("run", "draws"),
    [
        (F.linear, False),
        (lambda x, w: F.dropout(x, 0.5, training=True), True),
        (lambda x, w: F.dropout(x, 0.5, training=False), False),
        (lambda x, w: torch.rand_like(x), True),
        (attention(0.0), False),
        (attention(0.5), True),
        (tiled_attention(0.0), False),
        (tiled_attention(0.5), True),
        (lambda x, w: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x), False),
        (lambda x, w: F.dropout(attention(0.0)(x, w), 0.5), True),
    ],
)
def test_random_numbers_are_seen_in_a_graph(run: Any, draws: bool) -> None:
    """Attention draws some where it drops something, not merely because it could."""
    graph = make_fx(run, tracing_mode="fake")(torch.ones(1, 2, 8, 4), torch.ones(4, 4)).graph
    assert _compat.draws_random_numbers(graph) == draws


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.5, True)])
def test_dropout_may_have_its_name(dropout: float, draws: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    attend = torch.ops.aten._scaled_dot_product_flash_attention.default
    graph.output(graph.call_function(attend, (x, x, x), {"dropout_p": dropout}))
    assert _compat.draws_random_numbers(graph) == draws
