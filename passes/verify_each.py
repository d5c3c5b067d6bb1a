"""``Debug(verify_each_pass=True)``: after each pass all is checked that can hold by then, and an error names the pass.

A graph is linted after every pass. Once a pass has provided something (``contract.py``), the rules of the verifier that
are about it hold for the graph on its own, whatever passes follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import fx

from fxshard._torch.errors import PassError
from fxshard.passes.context import PassContext
from fxshard.passes.contract import GATHERS, REDUCTIONS, RELEASES, REPLICAS
from fxshard.planner.memory import MemoryPlan
from fxshard.schedule import verify
from fxshard.schedule.events import Phase
from fxshard.schedule.exchange_rules import replicas_are_added_up_once
from fxshard.schedule.record import record
from fxshard.schedule.step import ScheduleError, Step

RULES: dict[str, tuple[Callable[[Step], None], ...]] = {
    GATHERS: (verify.no_double_gather, verify.reads_between_wait_and_reshard),
    RELEASES: (verify.unshard_has_one_wait_and_one_reshard,),
    REDUCTIONS: (
        verify.not_rewritten_before_reduced,
        verify.reduce_after_all_writes,
        verify.at_most_two_gradient_buckets,
    ),
    REPLICAS: (replicas_are_added_up_once,),
}
"""{what a pass provides: the rules that can be checked from then on}"""


def verify_pass(what: str, where: str, module: fx.GraphModule, context: PassContext, facts: Collection[str]) -> None:
    """Check the graph called ``where``, of which the ``facts`` hold."""
    rules = [rule for fact, about in RULES.items() if fact in facts for rule in about]
    with _blaming(what):
        module.graph.lint()
        if rules:
            _verify({Phase(where): module}, context, rules, MemoryPlan({}, 0))


def verify_step(what: str, graphs: Mapping[Phase, fx.GraphModule], context: PassContext, memory: MemoryPlan) -> None:
    """Check the graphs of a whole step in their final order, but for what an optimizer of fxshard's own adds to it."""
    with _blaming(what):
        _verify(graphs, context, verify.RULES, memory, context.options.budget)


def _verify(
    graphs: Mapping[Phase, fx.GraphModule],
    context: PassContext,
    rules: Iterable[Callable[[Step], None]],
    memory: MemoryPlan,
    budget: int | None = None,
) -> None:
    zero = context.options.zero
    fused = context.options.fused
    made = record(graphs, context.buckets, memory, ranks=context.ranks, zero=zero, budget=budget, fused=fused)
    verify.buckets_exist(made)
    step = Step(made)
    for rule in rules:
        rule(step)


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ScheduleError) as error:
        raise PassError(f"{what} left something wrong: {error}") from error
