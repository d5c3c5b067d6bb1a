"""Contracts: a list of passes that cannot work fails when it is built, and says who lacks what."""

from collections.abc import Callable

import pytest
from torch import fx

import fxshard
from fxshard.passes import pipeline
from fxshard.passes.context import PassContext
from fxshard.passes.contract import CONTRACTS, REASONS
from fxshard.passes.defer_wgrad import defer_wgrad
from fxshard.passes.pass_list import PassList, places


def mine(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return module


def reordered(where: str, *names: str) -> PassList:
    """fxshard's list with the passes of one graph in another order."""
    lists = dict(fxshard.PASSES.lists())
    known = {place.name: place for place in lists[where]}
    return PassList(**{**lists, where: tuple(known[name] for name in names)})


@pytest.mark.shows("A6")
@pytest.mark.parametrize(
    ("build", "lacks", "what", "source"),
    [
        (lambda: fxshard.PASSES.without("insert_unshard"), "stage_quantized", "gathers", "insert_unshard"),
        (lambda: fxshard.PASSES.without("insert_reshard"), "order_prefetch", "releases", "insert_reshard"),
        (lambda: fxshard.PASSES.without("open_experts"), "quantize_linears", "experts opened", "open_experts"),
        (lambda: fxshard.PASSES.without("quantize_linears"), "stage_quantized", "MXFP8", "quantize_linears"),
        (lambda: fxshard.PASSES.without("recompute_param_views"), "partition", "views", "recompute_param_views"),
        (lambda: fxshard.PASSES.without("stage_quantized"), "order_prefetch", "quantized copies", "stage_quantized"),
        (
            lambda: fxshard.PASSES.without("insert_reduce_scatter"),
            "insert_all_reduce",
            "reduced gradients",
            "insert_reduce_scatter",
        ),
        (lambda: fxshard.PASSES.without("insert_all_reduce"), "order_prefetch", "replicas", "insert_all_reduce"),
        (
            lambda: reordered("forward", "insert_reshard", "insert_unshard", "stage_quantized"),
            "insert_reshard",
            "gathers",
            "insert_unshard",
        ),
        (
            lambda: fxshard.PASSES.without("defer_wgrad").after("write_gradients", defer_wgrad),
            "defer_wgrad",
            "gradients as outputs",
            "defer_wgrad",
        ),
    ],
)
def test_an_order_that_cannot_work_fails_when_it_is_built(
    build: Callable[[], PassList], lacks: str, what: str, source: str
) -> None:
    with pytest.raises(fxshard.ConfigError) as caught:
        build()
    message = str(caught.value)
    assert f"the pass {lacks!r} lacks" in message and what in message and repr(source) in message


def test_what_is_replaced_is_still_provided() -> None:
    assert "mine (in place of insert_reshard)*" in str(fxshard.PASSES.replace("insert_reshard", mine))


@pytest.mark.parametrize("name", ["group_experts", "save_residuals", "defer_wgrad", "write_gradients"])
def test_what_nothing_needs_can_be_dropped(name: str) -> None:
    assert name not in fxshard.PASSES.without(name).names


def test_own_passes_need_nothing() -> None:
    for name in fxshard.PASSES.names:
        assert "mine" in fxshard.PASSES.before(name, mine).names


def test_contracts_are_of_passes_and_facts_that_there_are() -> None:
    assert CONTRACTS.keys() <= set(fxshard.PASSES.names)
    for contract in CONTRACTS.values():
        assert contract.requires | contract.provides | contract.ends <= REASONS.keys()
    assert places(*pipeline.JOINT) == fxshard.PASSES.joint
