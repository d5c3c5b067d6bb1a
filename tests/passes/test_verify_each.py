"""``Debug(verify_each_pass=True)``: an error names the pass after which something is wrong."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import fx

import fxshard
from fxshard.passes.context import PassContext
from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.passes.insert_reshard import insert_reshard
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.schedule.events import Kind, events
from tests.stack import Stack, batch

EACH = fxshard.Debug(verify_each_pass=True)


def planned(passes: fxshard.PassList, debug: fxshard.Debug = EACH, **options: object) -> fxshard.Schedule:
    return fxshard.plan(
        Stack(),
        batch(0, 0),
        world_size=4,
        lowering="eager",
        passes=passes,
        debug=debug,
        **options,  # type: ignore[arg-type]
    )


def of_kind(module: fx.GraphModule, kind: Kind) -> Iterator[fx.Node]:
    return (node for node, event in list(events(module.graph)) if event.kind is kind)


def unshard_twice(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    insert_unshard(module, context)
    node = next(of_kind(module, Kind.UNSHARD))
    node.append(module.graph.node_copy(node))
    return module


def reshard_early(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    insert_reshard(module, context)
    wait = next(of_kind(module, Kind.WAIT))
    after = next(node for node in of_kind(module, Kind.RESHARD) if node.args == wait.args)
    list(wait.users)[-1].append(after)
    return module


def reduce_early(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    insert_reduce_scatter(module, context)
    next(of_kind(module, Kind.GRAD)).append(next(of_kind(module, Kind.REDUCE)))
    return module


def uses_before_it_makes(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    source = next(node for node in module.graph.nodes if node.target is torch.ops.aten.tanh.default)
    next(iter(source.users)).append(source)
    return module


@pytest.mark.parametrize(
    ("name", "broken", "rule"),
    [
        ("insert_unshard", unshard_twice, "gathers what is there since event"),
        ("insert_reshard", reshard_early, "which is not there"),
        ("insert_reduce_scatter", reduce_early, "which writes to the bucket"),
        ("save_residuals", uses_before_it_makes, "used before it has been defined"),
    ],
)
def test_the_pass_is_named(name: str, broken: object, rule: str) -> None:
    with pytest.raises(fxshard.PassError) as caught:
        planned(fxshard.PASSES.replace(name, broken))  # type: ignore[arg-type]
    assert f"the pass {broken.__name__} (in place of {name}) on the" in str(caught.value)  # type: ignore[attr-defined]
    assert rule in str(caught.value)


def test_without_it_only_the_schedule_is_checked() -> None:
    with pytest.raises(fxshard.PassError, match="passes of your own took part in it"):
        planned(fxshard.PASSES.replace("insert_reshard", reshard_early), fxshard.Debug())


@pytest.mark.parametrize(("zero", "shard_size"), [(0, 4), (1, 4), (2, 2), (3, 2)])
def test_what_is_right_passes_and_the_schedule_is_the_same(zero: int, shard_size: int) -> None:
    options = {"zero": zero, "shard_size": shard_size}
    each = planned(fxshard.PASSES, **options)
    assert each == planned(fxshard.PASSES, replace(EACH, verify_each_pass=False), **options)
