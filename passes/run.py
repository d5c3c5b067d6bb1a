"""Running a list of passes over one graph: each is checked, and what it did can be watched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import fx

from fxshard._torch.errors import BudgetError, FxshardError, PassError
from fxshard.passes.context import PassContext
from fxshard.passes.contract import facts_after
from fxshard.passes.pass_list import PassList, Place
from fxshard.passes.verify_each import verify_pass


def run_passes(where: str, listed: Iterable[Place], module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Run passes in order over the graph that is called ``where``."""
    facts: frozenset[str] = frozenset()
    for place in listed:
        watch = context.observer.begin(where, place.title, module) if context.observer is not None else None
        module = _run(where, place, module, context)
        if context.options.debug.verify_each_pass:
            facts = facts_after([place.name], facts)
            verify_pass(_what(where, place), where, module, context, facts)
        if watch is not None:
            watch.done(module)
    return module


def _run(where: str, place: Place, module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    what = _what(where, place)
    interface = _interface(module) if place.own else None
    try:
        result = place.run(module, context)
    except FxshardError:
        raise
    except Exception as error:
        raise PassError(f"{what} failed: {type(error).__name__}: {error}") from error
    if not isinstance(result, fx.GraphModule):
        raise PassError(
            f"{what} returned {type(result).__name__}: a pass returns the GraphModule, also where it worked in place"
        )
    if interface is not None:
        _check(what, interface, result)
    return result


def _what(where: str, place: Place) -> str:
    return f"the pass {place.title} on the {where} graph"


def _check(what: str, interface: tuple[int, int], module: fx.GraphModule) -> None:
    """What only a pass of the user's may get wrong; fxshard's own have tests."""
    try:
        module.graph.lint()
    except RuntimeError as error:
        raise PassError(f"{what} left a graph that is wrong: {error}") from error
    if _interface(module) != interface:
        raise PassError(
            f"{what} changed what goes into the graph or comes out of it: (inputs, outputs) were {interface} and are "
            f"{_interface(module)}; a pass may change what happens in between"
        )


def _interface(module: fx.GraphModule) -> tuple[int, int]:
    outputs = module.graph.output_node().args[0]
    return len(module.graph.find_nodes(op="placeholder")), len(outputs) if isinstance(outputs, tuple | list) else 1


@contextmanager
def blaming(passes: PassList) -> Iterator[None]:
    """Where a schedule turns out wrong and passes of the user's had a hand in it, say so."""
    try:
        yield
    except (BudgetError, PassError):
        raise
    except Exception as error:
        if not passes.own:
            raise
        raise PassError(
            f"the schedule is wrong, and passes of your own took part in it ({', '.join(passes.own)}): "
            f"{type(error).__name__}: {error}\nCompile without them to see whether they are the cause."
        ) from error
