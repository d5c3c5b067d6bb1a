"""Weight gradients of fused experts run later where that hides a reduction, and enter exactly one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import fx

import fxshard
from fxshard.events import Kind, event_of, events
from fxshard.passes.aliases import readers
from tests.fused.moe import moe
from tests.pool import Pool
from tests.training import EPS, Run, plain_run, train

VOCAB, LAYERS = 320, 2
"""The embedding is larger than a layer of experts: the products of the first layer may run behind it."""


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


def on_and_off() -> dict[bool, tuple[Run, dict[str, Gradient]]]:
    found = {}
    for defer in (True, False):
        model = fxshard.compile(
            moe(vocab=VOCAB), optimizer=fxshard.AdamW(lr=1e-3, eps=EPS), lowering="eager", defer_wgrad=defer
        )
        run = train(model, model.optimizer, steps=2)
        model.schedule.verify()
        found[defer] = run, gradients(model.graphs["backward"].graph)
    return found


@pytest.mark.shows("G9")
def test_deferred_weight_gradients_are_reduced_once(ranks: Pool) -> None:
    reference = plain_run(2, lambda: moe(grouped=False, vocab=VOCAB), steps=2)
    weights = {f"layers.{layer}.{name}" for layer in range(LAYERS) for name in ("gate_up", "down")}
    for found in ranks(2, on_and_off):
        (on, moved), (off, as_traced) = found[True], found[False]
        assert on.same(off)
        assert on.distance(reference) < 5e-6
        for listed in (moved, as_traced):
            assert listed.keys() == weights
            for one in listed.values():
                assert (one.writes, one.reductions_before, one.reductions_behind) == (1, 0, 1), one
        assert not any(one.behind_the_embedding for one in as_traced.values())
        assert {name for name, one in moved.items() if one.behind_the_embedding} == {
            "layers.0.gate_up",
            "layers.0.down",
        }
