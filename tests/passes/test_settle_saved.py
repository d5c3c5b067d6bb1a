"""What forward computes for backward alone stands in its own layer."""

from __future__ import annotations

import operator

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxshard.passes.settle_saved import settle_saved


def forward() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """Two layers and a loss, then what the partitioner puts to the end, the last layer's first."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    made = {"first": graph.call_function(torch.ops.aten.var_mean.default, (x,))}
    made["mean"] = graph.call_function(operator.getitem, (made["first"], 1))
    made["second"] = graph.call_function(torch.ops.aten.mul.Tensor, (made["mean"], weight))
    made["loss"] = graph.call_function(torch.ops.aten.sum.default, (made["second"],))
    made["of_second"] = graph.call_function(torch.ops.aten.div.Tensor, (made["second"], 3))
    made["again"] = graph.call_function(torch.ops.aten.neg.default, (made["of_second"],))
    made["variance"] = graph.call_function(operator.getitem, (made["first"], 0))
    made["of_first"] = graph.call_function(torch.ops.aten.div.Tensor, (made["variance"], 3))
    made["drawn"] = graph.call_function(torch.ops.aten.bernoulli.default, (made["mean"],))
    made["of_weight"] = graph.call_function(torch.ops.aten.t.default, (weight,))
    saved = [made[name] for name in ("again", "of_first", "drawn", "of_weight")]
    graph.output((made["loss"], *saved))
    return graph, made


def settled() -> list[str]:
    graph, made = forward()
    settle_saved(fx.GraphModule(torch.nn.Module(), graph), 1)
    graph.lint()
    name = {node: name for name, node in made.items()}
    return [name[node] for node in graph.nodes if node in name]


def test_it_stands_after_what_it_is_made_of() -> None:
    order = settled()
    assert order.index("of_first") < order.index("second")
    assert order.index("again") < order.index("loss")


def test_what_draws_random_numbers_or_reads_only_parameters_stays() -> None:
    assert settled()[-2:] == ["drawn", "of_weight"]


def test_the_order_of_a_layer_is_that_of_the_others() -> None:
    """What was put to the end layer by layer stands in each layer as it stood there."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    layers = [x := graph.call_function(torch.ops.aten.sin.default, (x,)) for _ in range(3)]
    loss = graph.call_function(torch.ops.aten.sum.default, (x,))
    saved = [
        graph.call_function(called, (layer,))
        for layer in reversed(layers)
        for called in (torch.ops.aten.neg.default, torch.ops.aten.exp.default)
    ]
    graph.output((loss, *saved))
    settle_saved(fx.GraphModule(torch.nn.Module(), graph), 1)
    called = [node.target.__name__.split(".")[0] for node in graph.nodes if node.op == "call_function"]
    assert called == [*["sin", "neg", "exp"] * 3, "sum"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12))
def test_nothing_is_read_before_it_is_made(pairs: list[tuple[int, int]]) -> None:
    """Each pair says which two of the values before it the next one is made of."""
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    values += [graph.call_function(torch.ops.aten.sin.default, (values[-1],)) for _ in range(2)]
    loss = graph.call_function(torch.ops.aten.sum.default, (values[-1],))
    for a, b in pairs:
        made_of = values[a % len(values)], values[b % len(values)]
        values.append(graph.call_function(torch.ops.aten.add.Tensor, made_of))
    graph.output((loss, *values[3:]))
    module = fx.GraphModule(torch.nn.Module(), graph)
    x = torch.linspace(-1, 1, 5)
    before = module(x)
    settle_saved(module, 1)
    graph.lint()
    module.recompile()
    assert all(map(torch.equal, module(x), before))
