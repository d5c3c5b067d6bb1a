"""Fused experts under ZeRO-3: they train like the plain model, no gathered weight is kept for backward, and weight
gradients run later where that hides a reduction, and enter exactly one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx

import fxshard
from fxshard.schedule.aliases import readers
from fxshard.schedule.events import Kind, event_of, events
from tests.fused.moe import EXPERTS, moe
from tests.pool import Pool
from tests.training import EPS, Run, plain_run, train

VOCAB, STEPS = 320, 2
"""The embedding is larger than a layer of experts: the products of the first layer may run behind it."""
WEIGHTS = {f"layers.{layer}.{name}" for layer in range(2) for name in ("gate_up", "down")}


@dataclass
class Gradient:
    """How one ``grouped_wgrad`` of a backward graph reaches the ranks."""

    param: str
    writes: int
    """Copies into a gradient bucket."""
    reductions_before: int
    reductions_behind: int
    behind_the_embedding: bool


def gradients(graph: fx.Graph) -> dict[str, Gradient]:
    order = {node: i for i, node in enumerate(graph.nodes)}
    reductions = [(order[node], event.bucket) for node, event in events(graph) if event.kind is Kind.REDUCE]
    written = {copy: target(copy) for copy in graph.nodes if str(copy.target) == "aten.copy_.default"}
    (embedding,) = (copy for copy, (_, param) in written.items() if param == "emb.weight")
    found: dict[str, Gradient] = {}
    for product in graph.nodes:
        if not str(product.target).startswith("fxshard.grouped_wgrad"):
            continue
        writes = [node for node in readers([product]) if node in written]
        bucket, param = written[writes[0]]
        own = [position for position, reduced in reductions if reduced == bucket]
        assert param not in found, f"two products are the gradient of {param}"
        found[param] = Gradient(
            param,
            len(writes),
            sum(position < order[writes[0]] for position in own),
            sum(position > order[writes[0]] for position in own),
            order[product] > order[embedding],
        )
    return found


def target(copy: fx.Node) -> tuple[str, str]:
    """(bucket, parameter) whose place in a gradient bucket a copy writes."""
    view: Any = copy.args[0]
    event = event_of(view.args[0])
    assert event is not None and event.kind is Kind.GRAD
    return event.bucket, event.params[view.args[1]]


def saved_weights(graph: fx.Graph) -> list[str]:
    """What forward leaves for backward that is a stack of weights, or a view of one."""
    values = {node: node.meta.get("val") for node in graph.output_node().all_input_nodes if node.op != "placeholder"}
    return [
        node.name
        for node, value in values.items()
        if isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[0] == EXPERTS
    ]


@dataclass
class Trained:
    run: Run
    gradients: dict[str, Gradient]
    saved: list[str]


def trained() -> dict[str, Trained]:
    cases = {"fused": {}, "in order": {"debug": fxshard.Debug(defer_wgrad=False)}, "unfused": {"experts": "off"}}
    found = {}
    for name, options in cases.items():
        optimizer = fxshard.AdamW(lr=1e-3, eps=EPS)
        model = fxshard.compile(moe(vocab=VOCAB), optimizer=optimizer, lowering="eager", **options)
        run = train(model, model.optimizer, STEPS)
        model.schedule.verify()
        forward, backward = (model.graphs[phase].graph for phase in ("forward", "backward"))
        assert ("fxshard.grouped_swiglu." in str([str(node.target) for node in forward.nodes])) == (name != "unfused")
        found[name] = Trained(run, gradients(backward), saved_weights(forward))
    return found


@pytest.fixture(scope="module")
def by_rank(ranks: Pool) -> list[dict[str, Trained]]:
    return ranks(2, trained)


@pytest.mark.shows("G3")
def test_zero_3_trains_like_experts_one_by_one(by_rank: list[dict[str, Trained]]) -> None:
    reference = plain_run(2, lambda: moe(grouped=False, vocab=VOCAB), steps=STEPS)
    for found in by_rank:
        for name, case in found.items():
            assert case.run.losses == pytest.approx(reference.losses, rel=2e-6), name
            assert case.run.distance(reference) < 5e-6, name


@pytest.mark.shows("G9")
def test_deferred_weight_gradients_are_reduced_once(by_rank: list[dict[str, Trained]]) -> None:
    for found in by_rank:
        deferred, in_order = found["fused"], found["in order"]
        assert deferred.run.same(in_order.run)
        for case in found.values():
            assert case.gradients.keys() == WEIGHTS
            for one in case.gradients.values():
                assert (one.writes, one.reductions_before, one.reductions_behind) == (1, 0, 1), one
        moved = {name for name, one in deferred.gradients.items() if one.behind_the_embedding}
        assert moved == {"layers.0.gate_up", "layers.0.down"}
        assert not any(one.behind_the_embedding for one in in_order.gradients.values())


def test_weights_are_not_saved(by_rank: list[dict[str, Trained]]) -> None:
    for found in by_rank:
        assert found["fused"].saved == []
