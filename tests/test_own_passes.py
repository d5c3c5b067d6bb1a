"""Passes of one's own: added, dropped, put in another's place, and caught where they break something."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx

import fxshard
from fxshard.passes.context import PassContext
from fxshard.passes.insert_reshard import insert_reshard
from fxshard.passes.options import Options
from fxshard.passes.pass_list import Pass
from fxshard.schedule.events import Kind, events
from tests.pool import Pool
from tests.stack import Stack
from tests.toy import Linears
from tests.training import Run, sharded_run


def nothing(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return module


def my_reshard(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return insert_reshard(module, context)


def default_and_own() -> tuple[Run, Run]:
    own = fxshard.PASSES.without("defer_wgrad").without("write_gradients").replace("insert_reshard", my_reshard)
    for name in ("fuse_grouped_swiglu", "recompute_param_views", "insert_reshard"):
        own = own.after(name, nothing)
    return sharded_run(Stack, steps=2), sharded_run(Stack, steps=2, passes=own)


def test_training_is_bitwise_the_same(ranks: Pool) -> None:
    for default, own in ranks(2, default_and_own, timeout=350):
        assert own.same(default)


def planned(passes: fxshard.PassList) -> fxshard.Schedule:
    return fxshard.plan(Linears(4, bias=False), (torch.ones(4, 8),), world_size=2, lowering="eager", passes=passes)


def test_a_pass_sees_every_graph_in_its_place() -> None:
    seen: list[tuple[str, bool]] = []

    def looking(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
        kinds = {event.kind for _, event in events(module.graph)}
        seen.append((context.phase, Kind.WAIT in kinds and Kind.RESHARD not in kinds))
        return module

    planned(fxshard.PASSES.after("insert_unshard", looking))
    assert seen == [("forward", True), ("backward", True)]


# -- what breaks -------------------------------------------------------------------------------------------------------


def gives_nothing(module: fx.GraphModule, context: PassContext) -> None:
    module.graph.lint()


def stumbles(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    raise KeyError("mm_7")


def moves_a_use_before_its_source(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    source = next(node for node in module.graph.nodes if node.target is torch.ops.aten.tanh.default)
    next(iter(source.users)).append(source)
    return module


def loses_an_output(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    output = module.graph.output_node()
    output.args = (output.args[0][:-1],)  # type: ignore[index]
    return module


def loses_a_gather(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    for node, event in list(events(module.graph)):
        if event.kind is Kind.UNSHARD and event.bucket_index == 1:
            module.graph.erase_node(node)
    return module


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (gives_nothing, "on the forward graph returned NoneType"),
        (stumbles, "on the forward graph failed: KeyError: 'mm_7'"),
        (moves_a_use_before_its_source, "left a graph that is wrong"),
        (loses_an_output, "changed what goes into the graph or comes out of it"),
        (loses_a_gather, "passes of your own took part in it"),
    ],
)
def test_a_broken_pass_is_named(broken: Pass, message: str) -> None:
    with pytest.raises(fxshard.PassError) as caught:
        planned(fxshard.PASSES.after("insert_reshard", broken))
    assert message in str(caught.value) and broken.__name__ in str(caught.value)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda p: p.after("insert_reshards", nothing),
            "the passes are recognize_masks, measure_logits, chunk_loss, scale_narrow, group_experts",
        ),
        (lambda p: p.without("insert_reshard"), "keep_resident and plan_memory need to know where a bucket may go"),
        (lambda p: p.without("plan_memory"), "has a fixed place at the end"),
        (lambda p: p.before("insert_reshard", nothing).after("insert_reshard", nothing), "are called 'nothing'"),
        (lambda p: p.after("insert_reshard", "defer_wgrad"), "'defer_wgrad' is no pass"),
        (lambda p: Options(passes=[nothing]), "expected a list derived from fxshard.PASSES"),
    ],
)
def test_what_cannot_be_asked_for(edit: Callable[[fxshard.PassList], object], message: str) -> None:
    with pytest.raises(fxshard.ConfigError) as caught:
        edit(fxshard.PASSES)
    assert message in str(caught.value)


def test_a_list_prints_its_order() -> None:
    shown = str(fxshard.PASSES.replace("defer_wgrad", nothing).after("defer_wgrad", my_reshard))
    assert "nothing (in place of defer_wgrad)* → my_reshard* → insert_unshard" in shown
    assert fxshard.PASSES.own == ()


# -- watching ----------------------------------------------------------------------------------------------------------


def test_log_and_dump(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSHARD_DUMP", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="fxshard"):
        schedule = planned(fxshard.PASSES)
    assert "forward: insert_unshard: " in caplog.text and "+4 unshard, +4 wait" in caplog.text
    assert "order_prefetch: 1 gathers ahead: the arena needs" in caplog.text
    assert (
        "keep_resident: kept from forward to backward: " in caplog.text and "fill_arena: forward starts" in caplog.text
    )
    assert "backward: apply_decisions: " in caplog.text
    assert re.search(r"joint: recompute_param_views: .* nodes as before, something noted on \d+", caplog.text)
    (folder,) = tmp_path.glob("rank-0/capture-*")
    watched = {file.name.split(".")[0].split("-")[2] for file in folder.glob("*-*.after.txt")}
    assert watched >= {"insert_unshard", "insert_reduce_scatter", "apply_decisions"}
    before, after = (
        next(folder.glob(f"*-forward-insert_reshard.{when}.txt")).read_text() for when in ("before", "after")
    )
    assert "reshard" not in before and "reshard layers.1: last use" in after
    assert json.loads((folder / "train.schedule.json").read_text())
    assert f"digest {schedule.digest}" in (folder / "train.schedule.txt").read_text()


def test_quiet_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXSHARD_DUMP", raising=False)
    planned(fxshard.PASSES)
    assert not [record for record in caplog.records if record.name == "fxshard"]
