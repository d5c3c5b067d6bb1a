"""recompute_saved: which saved values can be made again, of what, and in which order they are tried."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.passes.recompute_saved import candidates, mark
from fxshard.planner.hardware import PRESETS
from tests.passes.graphs import Draft, aten

CPU = PRESETS["cpu"]


def residual(layers: int = 2) -> fx.Graph:
    """``x = x + tanh(x @ w)``, layer by layer; modules as Dynamo writes them down."""
    draft = Draft()
    x = draft.input("x", 32, 32)
    for i in range(layers):
        weight = draft.input(f"w{i}", 32, 32)
        product = draft.call(aten.mm.default, x, weight)
        bent = draft.call(aten.tanh.default, product)
        x = draft.call(aten.add.Tensor, x, bent)
        for node, path in ((product, f"layers.{i}.up"), (bent, f"layers.{i}"), (x, f"layers.{i}")):
            node.meta["nn_module_stack"] = {path: (f"L['model'].{path}", torch.nn.Module)}
    return draft.output(draft.call(aten.sum.default, x)).graph


SAVED = ("mm", "mm_1", "add")


def test_one_kind_in_all_layers_is_one_candidate() -> None:
    sums, products = candidates(residual(), SAVED, (), CPU)
    assert sums.recomputed.name == "layers.* add" and sums.nodes == {"add", "tanh"}, "cheap, and so the first"
    assert products.recomputed.name == "layers.*.up mm" and products.recomputed.count == 2
    assert products.recomputed.bytes == 2 * 32 * 32 * 4
    assert products.nodes == {"mm", "mm_1"}, "made of the input and of the sum, which is kept"


def test_a_residual_stream_is_not_made_of_itself() -> None:
    """The second sum is made of the first one: without both, the whole model would be computed again for each layer."""
    found = candidates(residual(3), ("add", "add_1"), (), CPU)
    assert found == []


def test_the_order_in_which_values_are_named_does_not_count() -> None:
    first, second = (candidates(residual(3), names, (), CPU) for names in (SAVED, tuple(reversed(SAVED))))
    assert first == second


def test_what_is_asked_for_drawn_or_marked_is_left_alone() -> None:
    graph, products = residual(1), ("mm",)
    assert candidates(graph, products, (), CPU)
    assert candidates(graph, products, ("mm",), CPU) == []
    (product, *_) = graph.find_nodes(op="call_function", target=aten.mm.default)
    product.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert candidates(graph, products, (), CPU) == []

    draft = Draft()
    x = draft.input("x", 32, 32)
    noise = draft.call(aten.bernoulli.p, x, 0.5)
    module = draft.output(draft.call(aten.mul.Tensor, noise, x))
    assert candidates(module.graph, (noise.name,), (), CPU) == []


def test_marked_nodes_must_be_computed_again() -> None:
    graph = residual()
    mark(graph, {"mm"})
    said = {node.name: node.meta["recompute"] for node in graph.nodes if "recompute" in node.meta}
    assert said == {"mm": CheckpointPolicy.MUST_RECOMPUTE}
