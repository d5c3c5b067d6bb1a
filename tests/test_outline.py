"""Outlines: AOTAutograd sees the inputs and outputs of graphs, and whether they are those that it expects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fxshard.outline import fits, outline, outlined

MODE = FakeTensorMode()


def value(*size: int, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    with MODE:
        made = torch.empty(size, dtype=dtype)
        return made if stride is None else torch.empty_strided(size, stride, dtype=dtype)


def graph(inputs: list[Any], outputs: list[Any]) -> fx.GraphModule:
    """A graph whose inputs and outputs have such values; an output that is a number is the input of that position."""
    made = fx.Graph()
    given = []
    for i, each in enumerate(inputs):
        given.append(made.placeholder(f"primals_{i}"))
        given[-1].meta = {"val": each, "desc": f"input {i}", "fxshard_param": i}
    results: list[Any] = []
    for each in outputs:
        if each is None or isinstance(each, int):
            results.append(None if each is None else given[each])
            continue
        between = made.call_function(torch.sin, (given[0],))
        results.append(made.call_function(torch.cos, (between,)))
        results[-1].meta = {"val": each, "saved_tensor_with_no_vc_check": True, "seq_nr": 3}
    made.output(tuple(results)).meta["desc"] = [f"output {i}" for i in range(len(outputs))]
    return fx.GraphModule(torch.nn.Module(), made)


def test_nothing_lies_between_inputs_and_outputs() -> None:
    x, y = value(2, 3), value(4)
    whole = graph([x, y], [value(5), 1, None])
    found = outline(whole)
    first, second, result, end = found.graph.nodes
    assert [node.name for node in (first, second)] == ["primals_0", "primals_1"]
    assert first.meta == {"val": x, "desc": "input 0"} and second.meta["val"] is y
    assert result.target is outlined and result.meta["saved_tensor_with_no_vc_check"] and "seq_nr" not in result.meta
    assert end.args == ((result, second, None),) and end.meta["desc"] == ["output 0", "output 1", "output 2"]
    found.graph.lint()
    with pytest.raises(RuntimeError, match="compiled elsewhere"):
        found(None, None)


def step() -> tuple[fx.GraphModule, fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a model with one parameter and one input, and a joint graph with their interface."""
    forward = graph([value(3, 3), value(2, 3)], [value(), value(2, 3), 0])
    backward = graph([value(2, 3), value(3, 3), value()], [value(3, 3), None])
    joint = graph([value(3, 3), value(2, 3), value()], [value(), value(3, 3), value(2, 3)])
    return forward, backward, joint


def test_graphs_fit_what_has_their_inputs_and_outputs() -> None:
    assert fits(*step(), 1)


@pytest.mark.parametrize(
    "joint",
    [
        graph([value(3, 3), value(2, 3)], [value(), None, None]),
        graph([value(3, 3), value(2, 4), value()], [value(), None, None]),
        graph([value(3, 3), value(2, 3, stride=(1, 2)), value()], [value(), None, None]),
        graph([value(3, 3), value(2, 3, dtype=torch.float64), value()], [value(), None, None]),
        graph([value(3, 3), value(2, 3), value(1)], [value(), None, None]),
        graph([value(3, 3), value(2, 3), value()], [value(1), None, None]),
        graph([value(3, 3), value(2, 3), value()], [None, None, None]),
        graph([value(3, 3), value(2, 3), value()], [value(), None]),
        graph([value(3, 3), value(2, 3), value(), value()], [value(), None, None]),
    ],
    ids=["fewer", "size", "stride", "dtype", "tangent", "result", "no result", "gradients", "tangents"],
)
def test_graphs_do_not_fit_anything_else(joint: fx.GraphModule) -> None:
    forward, backward, _ = step()
    assert not fits(forward, backward, joint, 1)


def test_random_states_that_a_partitioner_adds_do_not_fit() -> None:
    """AOTAutograd would have to know them from forward's inputs."""
    _, backward, joint = step()
    forward = graph([value(3, 3), value(2, 3), value(16)], [value(), value(2, 3), 0])
    assert not fits(forward, backward, joint, 1)
