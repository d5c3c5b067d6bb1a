"""Graphs to bytes and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard import _compat
from fxshard.events import META, Event, Kind, Phase, wait
from fxshard.passes.context import PARAM, ParamRef
from fxshard.remembered import graphs
from fxshard.remembered.canonical import Unnamed


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    made = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(made)):
        yield made


def traced(mode: FakeTensorMode, run: Any, *shape: int) -> fx.GraphModule:
    with mode:
        example = torch.empty(*shape)
    return make_fx(run)(example)


def again(module: fx.GraphModule) -> fx.GraphModule:
    found, others = graphs.loads(graphs.dumps({"it": module}, 1, "two"))
    assert others == (1, "two")
    return found["it"]


def compute(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = x.sin().split([1, 3], dim=0)
    c = torch.cat([a, b]).to(torch.float64)[..., :2].clone(memory_format=torch.contiguous_format)
    return c.sum(), a.t(), torch.full((2,), 3.5, device="cpu")


def test_nodes_come_back(mode: FakeTensorMode) -> None:
    module = traced(mode, compute, 4, 4)
    copy = again(module)
    assert str(copy.graph) == str(module.graph)
    for mine, other in zip(copy.graph.nodes, module.graph.nodes, strict=True):
        assert mine.target is other.target or mine.target == other.target
        assert set(mine.meta) == set(other.meta) - graphs.LEFT_BEHIND
        for value, expected in zip(*(_tensors(node.meta.get("val")) for node in (mine, other)), strict=True):
            assert type(value) is type(expected) and value.fake_mode is mode
            assert (value.shape, value.stride(), value.dtype) == (expected.shape, expected.stride(), expected.dtype)
            assert (value.device, value.storage_offset()) == (expected.device, expected.storage_offset())
            assert value.requires_grad == expected.requires_grad
    x = torch.randn(4, 4)
    assert all(torch.equal(a, b) for a, b in zip(copy(x), module(x), strict=True))


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def test_memory_is_shared_where_it_was(mode: FakeTensorMode) -> None:
    """Inductor writes in place where nobody else can see it."""
    module = traced(mode, compute, 4, 4)
    for one in (module, again(module)):
        values = [value for node in one.graph.nodes for value in _tensors(node.meta.get("val"))]
        shared = [[_compat.memory_of(a) == _compat.memory_of(b) for b in values] for a in values]
        same = [[a is b for b in values] for a in values]
        if one is module:
            expected = shared, same
    assert (shared, same) == expected and any(sum(row) > 1 for row in shared)


def test_marks_of_fxshard_come_back(mode: FakeTensorMode) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta[PARAM] = ParamRef(1, 2)
    waits = graph.call_function(wait, ("layers.0",))
    waits.meta[META] = Event(
        Kind.WAIT, Phase.FORWARD, "layers.0", 0, ("w",), 8, torch.bfloat16, "g", "compute", "because"
    )
    waits.meta["stack_trace"] = "somewhere in a script"
    graph.output((x, None, [waits]))
    module = fx.GraphModule(torch.nn.Module(), graph)
    first, second, last = again(module).graph.nodes
    assert first.meta == x.meta and second.meta == {META: waits.meta[META]} and second.target is wait
    assert last.args == ((first, None, [second]),)


def test_several_graphs_share_their_tensors(mode: FakeTensorMode) -> None:
    one = traced(mode, torch.sin, 3)
    two = traced(mode, torch.cos, 3)
    two.graph.find_nodes(op="placeholder")[0].meta["val"] = one.graph.find_nodes(op="placeholder")[0].meta["val"]
    found, _ = graphs.loads(graphs.dumps({1: one, 2: two}))
    first, second = (found[i].graph.find_nodes(op="placeholder")[0].meta["val"] for i in (1, 2))
    assert first is second


def calling(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    given = graph.placeholder("x")
    graph.output(graph.create_node("call_module", "part", (graph.create_node("call_module", "other", (given,)),)))
    return fx.GraphModule({"part": module, "other": module}, graph)


def test_a_graph_calls_those_before_it(mode: FakeTensorMode) -> None:
    part = traced(mode, torch.sin, 3)
    found, _ = graphs.loads(graphs.dumps({"part": part, "all": calling(part)}))
    assert found["all"].part is found["all"].other is found["part"]
    assert torch.equal(found["all"](torch.ones(3)), torch.ones(3).sin().sin())


def test_a_graph_that_calls_another_does_not_travel_alone(mode: FakeTensorMode) -> None:
    part = traced(mode, torch.sin, 3)
    for given in ({"all": calling(part)}, {"all": calling(part), "part": part}):
        with pytest.raises(Unnamed):
            graphs.dumps(given)


def mine(x: Any) -> Any:
    return x


def with_node(op: str, target: Any, meta: Any = None, **kwargs: Any) -> fx.GraphModule:
    root = torch.nn.Module()
    root.register_buffer("held", torch.ones(1))
    graph = fx.Graph()
    node = graph.create_node(op, target, (), kwargs)
    node.meta.update(meta or {})
    graph.output(node)
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize(
    "module",
    [
        with_node("call_function", mine, x=1),
        with_node("get_attr", "held"),
        with_node("call_function", torch.sin, {"val": torch.ones(2)}),
        with_node("call_function", torch.sin, {"noted": mine}),
        with_node("call_function", torch.sin, {"noted": [{"a": torch.nn.Linear(1, 1)}]}),
    ],
    ids=["function", "constant", "real tensor", "mark", "module"],
)
def test_what_another_process_may_not_have_does_not_travel(module: fx.GraphModule) -> None:
    with pytest.raises(Unnamed):
        graphs.dumps({"it": module})


def test_symbolic_sizes_do_not_travel(mode: FakeTensorMode) -> None:
    x = mode.from_tensor(torch.empty(5, 4), static_shapes=False)
    module = make_fx(torch.sin, tracing_mode="symbolic")(torch.empty(5, 4))
    module.graph.find_nodes(op="placeholder")[0].meta["val"] = x
    with pytest.raises(Unnamed):
        graphs.dumps({"it": module})


def test_bytes_are_read_without_the_program_that_wrote_them(mode: FakeTensorMode) -> None:
    module = traced(mode, compute, 4, 4)
    for node in module.graph.nodes:
        node.meta["nn_module_stack"] = {"": ("", mine)}
    assert __name__.encode() not in graphs.dumps({"it": module})
