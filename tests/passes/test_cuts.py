"""Cut points: behind heavy nodes, at the beginning and at the end, and nowhere else."""

import operator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fxshard.passes.cuts import CutPoints, is_heavy
from tests.passes.graphs import Draft, aten


def test_heavy_are_products_attention_convolution_and_embedding() -> None:
    draft = Draft()
    x, w = draft.input("x", 4, 4), draft.input("w", 4, 4)
    ids = draft.input("ids", 3, dtype=torch.int64)
    q = draft.input("q", 1, 2, 4, 8)
    image, kernel = draft.input("image", 1, 2, 5, 5), draft.input("kernel", 2, 2, 3, 3)
    heavy = [
        draft.call(aten.mm.default, x, w),
        draft.call(aten.addmm.default, x, x, w),
        draft.call(aten.embedding.default, w, ids),
        draft.call(aten.convolution.default, image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    ]
    attention = draft.graph.call_function(aten._scaled_dot_product_flash_attention.default, (q, q, q))
    light = [
        draft.call(aten.add.Tensor, x, w),
        draft.call(aten.t.default, w),
        draft.call(aten.sum.default, x),
        draft.graph.call_function(len, (x,)),
        x,
    ]
    assert all(map(is_heavy, [*heavy, attention]))
    assert not any(map(is_heavy, light))


def chain() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """x → sin → mm → cos → exp → mm_1 → tanh → output"""
    draft = Draft()
    x, w = draft.input("x", 4, 4), draft.input("w", 4, 4)
    sin = draft.call(aten.sin.default, x)
    mm = draft.call(aten.mm.default, sin, w)
    exp = draft.call(aten.exp.default, draft.call(aten.cos.default, mm))
    tanh = draft.call(aten.tanh.default, draft.call(aten.mm.default, exp, w))
    graph = draft.output(tanh).graph
    return graph, {node.name: node for node in graph.nodes}


def test_the_latest_cut_from_which_a_node_is_ahead() -> None:
    graph, at = chain()
    cuts = CutPoints(graph)
    expected = {
        "sin": "sin",
        "mm": "sin",
        "cos": "cos",
        "exp": "cos",
        "mm_1": "cos",
        "tanh": "tanh",
        "output": "output",
    }
    assert {name: cuts.at_or_before(at[name]).name for name in expected} == expected


def test_the_earliest_cut_that_has_a_node_behind() -> None:
    graph, at = chain()
    cuts = CutPoints(graph)
    expected = {"x": "sin", "w": "sin", "sin": "cos", "mm": "cos", "cos": "tanh", "mm_1": "tanh", "tanh": "output"}
    expected["output"] = "output"
    assert {name: cuts.after(at[name]).name for name in expected} == expected


def test_a_tuple_and_its_unpacking_stay_together() -> None:
    draft = Draft()
    x, w = draft.input("x", 2, 4, 4, 4), draft.input("w", 4, 4)
    attention = draft.graph.call_function(aten._scaled_dot_product_flash_attention.default, (x, x, x))
    first, second = (draft.graph.call_function(operator.getitem, (attention, i)) for i in range(2))
    sin = draft.graph.call_function(aten.sin.default, (first,))
    cuts = CutPoints(draft.output(sin, second, w).graph)
    assert cuts.after(attention) is sin
    assert cuts.at_or_before(second) is attention


def test_a_graph_that_computes_nothing_is_cut_before_its_output() -> None:
    draft = Draft()
    x = draft.input("x", 4)
    graph = draft.output(x).graph
    assert CutPoints(graph).after(x) is graph.output_node()


@settings(max_examples=60)
@given(ops=st.lists(st.sampled_from(["mm", "sin", "transpose"]), max_size=14))
def test_every_cut_is_behind_something_heavy_or_at_an_end(ops: list[str]) -> None:
    draft = Draft()
    x = node = draft.input("x", 4, 4)
    for op in ops:
        if op == "mm":
            node = draft.call(aten.mm.default, node, x)
        elif op == "sin":
            node = draft.call(aten.sin.default, node)
        else:
            node = draft.call(aten.clone.default, draft.call(aten.t.default, node))
    graph = draft.output(node).graph
    cuts, nodes = CutPoints(graph), list(graph.nodes)
    for at, node in enumerate(nodes[1:], start=1):
        before, behind = nodes.index(cuts.at_or_before(node)), nodes.index(cuts.after(node))
        assert before <= at and (behind > at or nodes[at].op == "output")
        for cut in (before, behind):
            assert cut in (1, len(nodes) - 1) or is_heavy(nodes[cut - 1])
        # No closer cut was passed over.
        assert not any(is_heavy(nodes[i - 1]) for i in range(before + 1, at + 1))
        assert not any(is_heavy(nodes[i - 1]) for i in range(at + 1, behind))
