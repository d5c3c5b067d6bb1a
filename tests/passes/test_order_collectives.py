"""order_collectives: the model's own collectives start early, are waited for late, and keep their order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import fxshard
from fxshard.passes.order_collectives import order_collectives
from fxshard.passes.scheduling import schedule
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.passes.stages import Partitioned
from fxshard.planner.domain import data_parallel
from fxshard.planner.model_groups import ModelGroup, labelled
from fxshard.schedule.collectives import GROUP
from fxshard.schedule.events import Kind, Phase, event_of
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, aten, bucket, context

SQUARE = (4, 4)
functional = torch.ops._c10d_functional
TP, EP = ModelGroup("tp", 8), ModelGroup("ep", 4, 8)


class Communicating(Draft):
    """A graph with collectives in it, which are not run to know what they give."""

    def start(self, value: fx.Node, group: ModelGroup = TP) -> fx.Node:
        node = self.graph.call_function(functional.all_reduce.default, (value, "sum", "0"))
        node.meta |= {"val": value.meta["val"], GROUP: group}
        return node

    def wait(self, start: fx.Node) -> fx.Node:
        node = self.graph.call_function(functional.wait_tensor.default, (start,))
        node.meta["val"] = start.meta["val"]
        return node

    def reduced(self, value: fx.Node, group: ModelGroup = TP) -> tuple[fx.Node, fx.Node]:
        start = self.start(value, group)
        return start, self.wait(start)


def ordered(module: fx.GraphModule, **options: Any) -> list[str]:
    given = context(bucket(0, SQUARE), phase=Phase.BACKWARD, **options)
    module = order_collectives(module, given)
    module.graph.lint()
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


def column_parallel() -> tuple[fx.GraphModule, list[fx.Node]]:
    """As tensor parallelism has it: the input's gradient is summed over ranks; the weight's need not wait for that."""
    draft = Communicating()
    t, x = draft.input("t", *SQUARE), draft.input("x", *SQUARE)
    before = draft.call(aten.mm.default, t, x)
    dx = draft.call(aten.mm.default, t, x)
    start, wait = draft.reduced(dx)
    rest = draft.call(aten.sin.default, wait)
    after = draft.call(aten.mm.default, x, t)
    module = draft.output(before, rest, after, grads=[ParamRef(0, 0), None, None])
    return module, [before, dx, start, wait, rest, after]


@pytest.mark.shows("T5")
def test_independent_products_run_between_start_and_wait() -> None:
    module, (before, dx, start, wait, rest, after) = column_parallel()
    assert ordered(module) == [n.name for n in (dx, start, before, after, wait, rest)]


def test_without_overlap_nothing_moves() -> None:
    module, nodes = column_parallel()
    assert ordered(module, overlap=False) == [node.name for node in nodes]


@pytest.mark.parametrize("views", [1, 2])
def test_views_that_are_saved_follow_the_wait_that_moves_to_its_first_use(views: int) -> None:
    """Experts' inputs: what came over the wire is saved for backward transposed, and read by a later product."""
    draft = Communicating()
    x = draft.input("x", *SQUARE)
    _, wait = draft.reduced(x)
    view = draft.call(aten.unsqueeze.default, wait, 1)
    saved = view
    for _ in range(views):
        saved = draft.call(aten.transpose.int, saved, 1, 2)
    other = draft.call(aten.mm.default, x, x)
    product = draft.call(aten.mul.Tensor, view, other)
    order = ordered(draft.output(product, saved))
    assert order.index(other.name) < order.index(wait.name) < order.index(view.name) < order.index(saved.name)


@pytest.mark.shows("T5")
def test_starts_keep_their_order_and_waits_stand_at_the_first_use() -> None:
    """As for queries, keys and values: three collectives are under way before the first is waited for."""
    draft = Communicating()
    x = draft.input("x", *SQUARE)
    parts = [draft.reduced(draft.call(aten.sin.default, x), group) for group in (TP, EP, TP)]
    views = [draft.call(aten.t.default, wait) for _, wait in parts]
    product = draft.call(aten.mm.default, views[1], views[2])
    last = draft.call(aten.mm.default, product, views[0])
    module = draft.output(last)
    order = ordered(module)
    places = {name: i for i, name in enumerate(order)}
    starts = [places[start.name] for start, _ in parts]
    waits = [places[wait.name] for _, wait in parts]
    assert starts == sorted(starts) and max(starts) < min(waits)
    assert waits[1] < waits[2] < places[product.name] < waits[0], "each before what reads it first"
    numbers = [
        event.number for node in module.graph.nodes if (event := event_of(node)) and event.kind is Kind.COLLECTIVE
    ]
    assert numbers == [0, 1, 2]


@pytest.mark.shows("T5")
def test_a_gradient_that_is_summed_at_the_end_is_summed_when_it_is_there() -> None:
    """As for norms under sequence parallelism: DTensor leaves the sums of all layers to the end of backward."""
    draft = Communicating()
    x = draft.input("x", *SQUARE)
    norm = draft.call(aten.sin.default, x)
    first, arrived = draft.reduced(draft.call(aten.mm.default, x, x))
    rest = draft.call(aten.mm.default, arrived, x)
    second, arrived_too = draft.reduced(rest)
    last = draft.call(aten.mm.default, arrived_too, x)
    late, gradient = draft.reduced(norm)
    order = ordered(draft.output(gradient, last))
    assert order.index(late.name) == order.index(norm.name) + 1
    assert order.index(late.name) < order.index(first.name) < order.index(second.name), "as their operands"
    assert order.index(gradient.name) < order.index(second.name), "over when the next one of its group is"


@pytest.mark.parametrize("barrier", ["random", "write"])
def test_nothing_moves_past(barrier: str) -> None:
    draft = Communicating()
    x, y = draft.input("x", *SQUARE), draft.input("y", *SQUARE)
    early = draft.call(aten.mm.default, y, y)
    between = draft.call(aten.bernoulli.p, y, 0.5) if barrier == "random" else draft.call(aten.add_.Tensor, y, 1)
    product = draft.call(aten.mm.default, x, x)
    start, wait = draft.reduced(product)
    module = draft.output(wait, early, between)
    order = ordered(module)
    assert order.index(early.name) < order.index(between.name) < order.index(start.name)


def test_what_only_reads_a_parameter_is_not_drawn_to_the_front() -> None:
    """A view of a parameter before a wait would have the parameter gathered before it, too."""
    draft = Communicating()
    x, weight = draft.input("x", *SQUARE), draft.input("w", *SQUARE, param=ParamRef(0, 0))
    start, wait = draft.reduced(draft.call(aten.sin.default, x))
    turned = draft.call(aten.t.default, weight)
    product = draft.call(aten.mm.default, wait, turned)
    order = ordered(draft.output(product))
    assert order[-4:] == [start.name, wait.name, turned.name, product.name]


# -- schedules ---------------------------------------------------------------------------------------------------------


def scheduled(module: fx.GraphModule, **options: Any) -> fxshard.Schedule:
    given = context(replace(bucket(0, SQUARE), domain=data_parallel(2, 1, "mean", "cpu")), **options)
    plan = ShardingPlan(given.buckets, given.options, ranks=2)
    return schedule(Partitioned({Phase.EVAL: module}, None), plan).schedule


def test_a_parameter_that_is_sent_as_it_is_is_released_after_the_wait() -> None:
    draft = Communicating()
    weight = draft.input("w", *SQUARE, param=ParamRef(0, 0))
    x = draft.input("x", *SQUARE)
    start, wait = draft.reduced(weight)
    hides = draft.call(aten.mm.default, x, x)
    product = draft.call(aten.mm.default, hides, wait)
    made = scheduled(draft.output(product))
    kinds = [event.kind for event in made.events]
    assert kinds.index(Kind.COLLECTIVE) < kinds.index(Kind.AWAIT) < kinds.index(Kind.RESHARD)
    reads = {event.kind: event.reads for event in made.events}
    assert reads[Kind.COLLECTIVE] == reads[Kind.AWAIT] == (0,)
    assert start.name and wait.name


@pytest.mark.shows("T5")
def test_a_collective_in_a_branch_is_an_error() -> None:
    """Ranks whose data differ would take different branches."""
    inner = Communicating()
    y = inner.input("y", *SQUARE)
    _, wait = inner.reduced(inner.call(aten.sin.default, y))
    other = Draft()
    z = other.input("z", *SQUARE)
    draft = Draft()
    x, chosen = draft.input("x", *SQUARE), draft.input("chosen", dtype=torch.bool)
    weight = draft.input("w", *SQUARE, param=ParamRef(0, 0))
    product = draft.call(aten.mm.default, x, weight)
    branches = [draft.graph.get_attr(name) for name in ("yes", "no")]
    taken = draft.graph.call_function(torch.ops.higher_order.cond, (chosen, *branches, (product,)))
    taken.meta["val"] = (x.meta["val"],)
    draft.graph.output((taken,))
    module = fx.GraphModule({"yes": inner.output(wait), "no": other.output(z)}, draft.graph)
    with pytest.raises(fxshard.ScheduleError, match="all_reduce stands in a branch of cond") as caught:
        scheduled(module)
    assert caught.value.rule == "collectives_have_one_order"


def test_a_pass_of_the_users_that_swaps_two_collectives_is_named() -> None:
    def swaps(module: fx.GraphModule, _: Any) -> fx.GraphModule:
        starts = [node for node in module.graph.nodes if (event := event_of(node)) and event.kind is Kind.COLLECTIVE]
        starts[0].prepend(starts[1])
        return module

    draft = Communicating()
    x, weight = draft.input("x", *SQUARE), draft.input("w", *SQUARE, param=ParamRef(0, 0))
    product = draft.call(aten.mm.default, x, weight)
    waits = [draft.reduced(product, group)[1] for group in (TP, EP)]
    module = draft.output(*waits)
    with pytest.raises(fxshard.FxshardError, match=r"collectives_have_one_order.*starts as number 0"):
        scheduled(module, passes=fxshard.PASSES.after("insert_reshard", swaps))


# -- groups ------------------------------------------------------------------------------------------------------------


def test_groups_are_named_alike_on_all_ranks() -> None:
    first = labelled([("3", "mesh_ep", (0, 1)), ("9", "undefined", (0, 4, 8)), ("11", "undefined", (0, 1))])
    other = labelled([("4", "mesh_ep", (2, 3)), ("9", "undefined", (2, 6, 10)), ("12", "undefined", (2, 3))])
    assert [*first.values()] == [*other.values()]
    assert [group.name for group in first.values()] == ["ep×2", "group×3", "group.2×2"]
    assert [group.stride for group in first.values()] == [1, 4, 1]
