"""Layers that repeat go through autograd once, and nothing can be told from it: bitwise, near misses included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.bench import models as bench
from fxshard.passes import partition
from fxshard.passes.context import PassContext
from fxshard.passes.fold_layers import fold_layers
from fxshard.passes.pipeline import before_partition
from fxshard.passes.recompute_saved import mark
from tests.thorough import thorough
from tests.toy import Llama

WIDTH, LAYERS = 6, 8
Rule = Callable[["Stack", int, nn.Module, Tensor, list[Tensor]], Tensor]
"""(model, number of the layer, layer, what goes in, what came out of the layers before) → what comes out"""


class Stack(nn.Module):
    """Layers in a loop; ``rule`` says what happens with each."""

    def __init__(self, rule: Rule, bias: Callable[[int], bool] = lambda i: True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias(i)) for i in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("scales", torch.arange(1.0, LAYERS + 1))
        self.rule = rule
        self.multipliers: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x = self.rule(self, i, layer, x, seen)
            seen.append(x)
        return self.head(x).square().mean()


def plain(model: Stack, i: int, layer: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
    return x + torch.tanh(layer(x))


def odd_at(place: int, change: Callable[[Tensor], Tensor]) -> Rule:
    def rule(model: Stack, i: int, layer: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
        x = plain(model, i, layer, x, seen)
        return change(x) if i == place else x

    return rule


def by_number(model: Stack, i: int, layer: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
    return x + torch.tanh(layer(x)) * model.multipliers[i]


def reaching_back(model: Stack, i: int, layer: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
    return plain(model, i, layer, x, seen) + (seen[i - 2] if i >= 2 else 0)


def mirrored(model: Stack, i: int, layer: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
    return plain(model, i, layer, x, seen) + (seen[LAYERS - 1 - i] if i > LAYERS // 2 else 0)


def looped(model: Stack, i: int, layer: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
    x = plain(model, i, layer, x, seen)
    for _ in range(12 if i == LAYERS - 1 else 0):  # repeats, and has no parameters
        x = torch.sin(x) * 1.5
    return x


def used_again(model: Stack, i: int, layer: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
    x = plain(model, i, layer, x, seen)
    return model.layers[4](x) if i == LAYERS - 1 else x


def with_multipliers(values: Callable[[int], float]) -> Stack:
    model = Stack(by_number)
    model.multipliers = [values(i) for i in range(LAYERS)]
    return model


def frozen(*places: int) -> Stack:
    model = Stack(plain)
    for i in places:
        model.layers[i].requires_grad_(False)
    return model


def tied(a: int, b: int, name: str = "weight", rule: Rule = plain) -> Stack:
    model = Stack(rule)
    setattr(model.layers[a], name, getattr(model.layers[b], name))
    return model


def bias_at_the_end(model: Stack, i: int, layer: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
    return x + torch.tanh(x @ layer.weight) + layer.bias  # type: ignore[operator]


def attended(layer: nn.Module, x: Tensor) -> Tensor:
    """Attention, for which torch keeps the state of random numbers, dropout or none."""
    heads = layer(x).view(1, x.shape[0], 2, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, torch.tanh(heads), heads).transpose(1, 2).reshape(x.shape)


ALIKE = {
    "plain": lambda: Stack(plain),
    "the same number on each": lambda: with_multipliers(lambda i: 0.5),
    "an odd first layer": lambda: Stack(odd_at(0, torch.neg)),
    "an odd last layer": lambda: Stack(odd_at(LAYERS - 1, torch.neg)),
    "all frozen but the head": lambda: frozen(*range(LAYERS)),
    "checkpointed": lambda: Stack(
        lambda model, i, layer, x, seen: x + checkpoint(lambda y: torch.tanh(layer(y)), x, use_reentrant=False)
    ),
    "checkpointed attention": lambda: Stack(
        lambda model, i, layer, x, seen: x + checkpoint(attended, layer, x, use_reentrant=False)
    ),
    "dropout": lambda: Stack(lambda model, i, layer, x, seen: F.dropout(plain(model, i, layer, x, seen), 0.3)),
}
UNLIKE = {
    "another number on each": lambda: with_multipliers(lambda i: 1.0 + i),
    "one number of another sign of zero": lambda: Stack(odd_at(4, lambda x: x + -0.0)),
    "an odd layer in the middle": lambda: Stack(odd_at(4, torch.neg)),
    "no bias in one": lambda: Stack(plain, bias=lambda i: i != 4),
    "one frozen": lambda: frozen(4),
    "two tied": lambda: tied(2, 6),
    "the first and the last tied": lambda: tied(0, LAYERS - 1, "bias", bias_at_the_end),
    "a buffer's row for each": lambda: Stack(
        lambda model, i, layer, x, seen: plain(model, i, layer, x, seen) * model.scales[i]
    ),
    "skips from the middle to the end": lambda: Stack(
        lambda model, i, layer, x, seen: plain(model, i, layer, x, seen) + (seen[3] if i == LAYERS - 1 else 0)
    ),
    "all layers read by the last": lambda: Stack(
        lambda model, i, layer, x, seen: plain(model, i, layer, x, seen) + (sum(seen) if i == LAYERS - 1 else 0)
    ),
    "the second read by the last": lambda: Stack(
        lambda model, i, layer, x, seen: plain(model, i, layer, x, seen) + (seen[1].sin() if i == LAYERS - 1 else 0)
    ),
    "the second read by the last, without a gradient": lambda: Stack(
        lambda model, i, layer, x, seen: plain(model, i, layer, x, seen) + (seen[1].detach() if i == LAYERS - 1 else 0)
    ),
    "the first and the third from last in one product": lambda: Stack(
        lambda model, i, layer, x, seen: plain(model, i, layer, x, seen) + (seen[0] * seen[5] if i == LAYERS - 1 else 0)
    ),
    "gradients that no parameter is read for": lambda: Stack(
        lambda model, i, layer, x, seen: x * 2 + layer.bias  # type: ignore[operator]
    ),
    "reaching back by two": lambda: Stack(reaching_back),
    "mirrored skips": lambda: Stack(mirrored),
    "a loop without parameters": lambda: Stack(looped),
    "a layer of the middle at the end": lambda: Stack(used_again),
}


def left(
    model: nn.Module, inputs: tuple[Tensor, ...], fold: bool, evaluated: bool = True, **options: Any
) -> tuple[list[Tensor], int]:
    """What two steps and an evaluation leave, and how many layers were folded in training."""
    debug = fxshard.Debug(fold_layers=fold)
    given = {"lowering": "eager", "optimizer": fxshard.AdamW(lr=1e-2), "debug": debug, **options}
    sharded = fxshard.compile(copy.deepcopy(model), **given)
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        loss = sharded(*inputs)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in sharded.parameters() if p.grad is not None)]
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    folded = sharded.report.compilations.layers_folded
    sharded.eval()
    if evaluated:
        with torch.no_grad():
            found.append(sharded(*inputs))
    return [*found, *sharded.full_state_dict().values()], folded


def folded(model: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> int:
    """Check that folding changes no bit; returns how many layers were folded."""
    mine, count = left(model, inputs, True, **options)
    whole, none = left(model, inputs, False, **options)
    assert none == 0 and len(mine) == len(whole)
    assert all(torch.equal(a, b) for a, b in zip(mine, whole, strict=True))
    return count


class Beside(nn.Module):
    """A value goes from layer to layer beside the stream, without a parameter; the end multiplies by it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        beside = torch.sin(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            beside = beside + 0.1
        return self.head(x + torch.sin(beside)).square().mean()


def test_what_backward_computes_again_of_all_layers_has_all_of_them() -> None:
    """Gradients are plain PyTorch's where backward begins with the way of a value through every layer."""
    model, x = Beside(), torch.randn(4, WIDTH)
    sharded = fxshard.compile(copy.deepcopy(model), lowering="eager")
    sharded(x).backward()
    model(x).backward()
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def some(names: dict[str, Any], *always: str) -> list[Any]:
    return [name if name in always else thorough(name) for name in names]


@pytest.mark.parametrize("name", some(ALIKE, "plain", "dropout", "checkpointed attention"))
def test_layers_that_compute_the_same_are_folded(name: str) -> None:
    assert folded(ALIKE[name](), (torch.randn(4, WIDTH),)) > 0


@pytest.mark.thorough
def test_layers_with_dropout_draw_the_same_numbers_where_inductor_draws_them() -> None:
    assert folded(ALIKE["dropout"](), (torch.randn(4, WIDTH),), lowering="inductor") > 0


class TwoStacks(nn.Module):
    """An encoder, and a decoder whose layers all read what the encoder gives."""

    def __init__(self, encoder: Stack, decoder: Stack) -> None:
        super().__init__()
        self.encoder, self.decoder, self.norm = encoder, decoder, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        read = x
        for i, layer in enumerate(self.encoder.layers):
            seen.append(read := self.encoder.rule(self.encoder, i, layer, read, seen) * 2)
        x, seen, read = torch.sin(x), [], self.norm(read)
        for i, layer in enumerate(self.decoder.layers):
            seen.append(x := self.decoder.rule(self.decoder, i, layer, x, seen) * torch.cos(read))
        return self.decoder.head(x).square().mean()


def test_every_stack_of_a_model_is_folded() -> None:
    assert folded(TwoStacks(Stack(plain), Stack(plain)), (torch.randn(4, WIDTH),)) == LAYERS - 5 + LAYERS - 6


class Scaled(nn.Module):
    """All layers read one trained value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.exp()
        for layer in self.layers:
            x = x + torch.tanh(F.linear(x, layer.weight * scale, layer.bias))  # type: ignore[operator, arg-type]
        return x.square().mean()


def test_one_layer_more_is_left_where_all_read_a_trained_value() -> None:
    """Its gradient is a sum that begins in the last two layers."""
    assert folded(Scaled(), (torch.randn(4, WIDTH),), evaluated=False) == LAYERS - 6


@pytest.mark.parametrize("name", some(UNLIKE, "the second read by the last"))
@pytest.mark.parametrize("first", [thorough(True), False])
def test_near_misses_in_one_of_two_stacks_give_the_same(name: str, first: bool) -> None:
    stacks = (UNLIKE[name](), Stack(plain)) if first else (Stack(plain), UNLIKE[name]())
    folded(TwoStacks(*stacks), (torch.randn(4, WIDTH),))


def read_elsewhere(read: Callable[[list[fx.Node], list[fx.Node]], fx.Node] | None) -> fx.GraphModule:
    """Layers in a row; the end also reads one of their weights, or of their results."""
    graph = fx.Graph()
    weights = [graph.placeholder(f"weight{layer}") for layer in range(LAYERS)]
    x = graph.placeholder("x")
    results: list[fx.Node] = []
    for weight in weights:
        results.append(x := graph.call_function(torch.mul, (x, weight)))
    end = graph.call_function(torch.add, (x, read(weights, results) if read is not None else 1.0))
    graph.output((end,))
    for node in graph.nodes:
        node.meta["example_value"] = torch.empty(4)
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("which", [0, 1])
def test_layers_that_are_read_elsewhere_are_not_folded(layer: int, which: int) -> None:
    """Only results of the last layer may be: gradients of the others would come from two sides."""
    kinds = ["weight"] * LAYERS + [None]
    assert fold_layers(read_elsewhere(None), kinds) is not None
    found = fold_layers(read_elsewhere(lambda *nodes: nodes[which][layer]), kinds)
    assert (found is not None) == (which == 1 and layer == LAYERS - 1)


@pytest.mark.parametrize("name", some(UNLIKE, "the second read by the last"))
def test_near_misses_give_the_same(name: str) -> None:
    """Whether some of their layers are folded is not asked: what they compute is."""
    folded(UNLIKE[name](), (torch.randn(4, WIDTH),))


class Halves(nn.Module):
    """Two residual sums in each layer, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)}) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer["a"](x))
            x = x + torch.sigmoid(layer["b"](x))
        return self.head(x).square().mean()


@pytest.mark.parametrize("which", [0, thorough(1)])
def test_what_backward_computes_again_may_reach_into_the_layer_before(which: int) -> None:
    """Of the two sums only one is saved, as a budget may decide: the other is computed again with the next layer's."""

    def keeping_one_sum(joint: fx.GraphModule, context: PassContext) -> fx.GraphModule:
        joint = before_partition(joint, context)
        of_backward: set[fx.Node] = set()
        computed: list[fx.Node] = []
        for node in joint.graph.nodes:
            if node.name.startswith("tangents") or of_backward & set(node.all_input_nodes):
                of_backward.add(node)
            elif node.op == "call_function":
                computed.append(node)
        sums = [node for node in computed if node.target is torch.ops.aten.add.Tensor]
        mark(joint.graph, {node.name for node in computed} - {node.name for node in sums[which::2]})
        return joint

    with mock.patch.object(partition, "before_partition", keeping_one_sum):
        assert folded(Halves(), (torch.randn(4, WIDTH),), evaluated=False) > 0


class Returning(nn.Module):
    """Also gives what one of its layers makes."""

    def __init__(self, which: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.which = which

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        seen = [x]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            seen.append(x)
        return x.square().mean(), seen[self.which]


@pytest.mark.parametrize("which", [4, LAYERS, *map(thorough, (0, 1, 2, 3, 5, 6, 7))])
def test_a_value_of_any_layer_may_be_returned(which: int) -> None:
    model, x = Returning(which), torch.randn(4, WIDTH)
    sharded = fxshard.compile(copy.deepcopy(model), lowering="eager")
    for mine, theirs in zip(sharded(x), model(x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.shows("S18")
@pytest.mark.parametrize("lowering", [thorough("eager"), thorough("inductor")])
def test_a_llama_with_two_inputs(lowering: str) -> None:
    tokens = torch.randint(0, 96, (2, 8))
    assert folded(Llama(layers=7), (tokens, tokens), lowering=lowering, evaluated=False) > 0


@pytest.mark.thorough
def test_layers_in_mxfp8() -> None:
    model = bench.Llama(bench.LlamaConfig(vocab=64, dim=64, layers=8, heads=2, hidden=128))
    tokens = torch.randint(0, 64, (2, 32))
    assert folded(model, (tokens, tokens), precision=fxshard.MXFP8(), evaluated=False) > 0


OPEN: dict[str, tuple[Rule, bool]] = {
    "computed with": (lambda model, i, layer, x, seen: plain(model, i, layer, x, seen) / (x.shape[0] * 2 + 1), True),
    "of parts": (
        lambda model, i, layer, x, seen: plain(model, i, layer, torch.cat([x, x])[: x.shape[0]], seen),
        True,
    ),
    "of views": (
        lambda model, i, layer, x, seen: plain(model, i, layer, x.view(x.shape[0], 2, -1).flatten(1), seen),
        True,
    ),
    "counted in layers": (lambda model, i, layer, x, seen: plain(model, i, layer, x, seen) * (x.shape[0] + i), False),
}
"""What layers do with a size that is open, and whether they are alike then."""


@pytest.mark.parametrize("name", some(OPEN, "computed with", "counted in layers"))
def test_layers_compute_with_open_sizes(name: str) -> None:
    rule, alike = OPEN[name]
    assert (folded(Stack(rule), (torch.randn(4, WIDTH),), dynamic=True) > 0) == alike


@pytest.mark.parametrize("name", some(ALIKE, "plain"))
def test_layers_of_open_sizes_are_folded(name: str) -> None:
    count = folded(ALIKE[name](), (torch.randn(4, WIDTH),), dynamic=True)
    assert (count > 0) == (name != "the same number on each")  # numbers are open then, too: an input for each layer


@pytest.mark.thorough
@pytest.mark.parametrize("name", UNLIKE)
def test_near_misses_of_open_sizes_give_the_same(name: str) -> None:
    folded(UNLIKE[name](), (torch.randn(4, WIDTH),), dynamic=True)


def picking(model: Stack, i: int, layer: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
    rows = (x.sum(-1) > 0).nonzero()[:, 0]
    return plain(model, i, layer, x, seen).index_add(0, rows, x[rows])


@pytest.mark.thorough
def test_sizes_that_depend_on_values_in_each_layer_are_not_folded() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert folded(Stack(picking), (torch.randn(4, WIDTH),)) == 0


class Counting(nn.Module):
    """A number is read from data ahead of the layers, as a vision-language model counts its image tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(plain)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > -9).nonzero()[:, 0]
        torch._check(rows.shape[0] == x.shape[0], lambda: "rows are missing")
        return self.stack(x[rows])


@pytest.mark.thorough
def test_layers_after_a_number_that_was_read_from_data() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        folded(Counting(), (torch.randn(4, WIDTH),))


@pytest.mark.parametrize(("odd", "folds"), [(None, True), (3, False)])
def test_functions_made_for_each_call_are_told_apart_by_what_they_hold(odd: int | None, folds: bool) -> None:
    """As Dynamo of torch 2.11 makes them for methods of DTensors."""

    def scaling(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, weight: factor * x * weight

    graph = fx.Graph()
    weights = [graph.placeholder(f"weight{layer}") for layer in range(LAYERS)]
    x = graph.placeholder("x")
    for layer, weight in enumerate(weights):
        x = graph.call_function(scaling(3.0 if layer == odd else 2.0), (x, weight))
    graph.output((x,))
    for node in graph.nodes:
        node.meta["example_value"] = torch.empty(4)
    found = fold_layers(fx.GraphModule(nn.Module(), graph), ["weight"] * LAYERS + [None])
    assert (found is not None) == folds
