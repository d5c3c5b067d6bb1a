"""What each pass requires and provides, so that an order that cannot work fails when it is built, with names.

A fact holds from the pass that provides it on. Forward and backward start with the facts of the joint graph. Passes of
the user's have no contract, except that one put in another's place takes over that one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fxshard._torch.errors import ConfigError

GRADIENT_OUTPUTS = "gradients as outputs"
OPENED = "experts opened"
MXFP8 = "products in MXFP8"
VIEWS = "views of parameters made again in backward"
COLLECTIVES = "collectives of the model as events"
GATHERS = "gathers"
COPIES = "quantized copies"
RELEASES = "releases"
REDUCTIONS = "reduced gradients"
REPLICAS = "replicas added up"

REASONS = {
    GRADIENT_OUTPUTS: "a graph returns them until they are written into buckets",
    OPENED: "experts that run in MXFP8 are recognised after that; precision= turns MXFP8 off",
    MXFP8: "parameters that rest quantized are read by them; precision= turns MXFP8 off",
    VIEWS: "else forward would save views of gathered buckets whose memory is given back",
    COLLECTIVES: "else their order could differ between ranks",
    GATHERS: "parameters have no memory until they are gathered",
    COPIES: "parameters that rest in MXFP8 are read through them; precision= turns MXFP8 off",
    RELEASES: "keep_resident and plan_memory need to know where a bucket may go",
    REDUCTIONS: "insert_all_reduce, write_gradients and the optimizer need them",
    REPLICAS: "else they would drift apart",
}
"""Why a fact is needed, or what to do about it."""


@dataclass(frozen=True)
class Contract:
    """What must hold before a pass, what holds after it, and what no longer does."""

    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()


def _contract(requires: Iterable[str] = (), provides: Iterable[str] = (), ends: Iterable[str] = ()) -> Contract:
    return Contract(frozenset(requires), frozenset(provides), frozenset(ends))


CONTRACTS: dict[str, Contract] = {
    "open_experts": _contract(provides=[OPENED]),
    "quantize_linears": _contract([OPENED], [MXFP8]),
    "recompute_param_views": _contract(provides=[VIEWS]),
    "order_collectives": _contract(provides=[COLLECTIVES]),
    "defer_wgrad": _contract([GRADIENT_OUTPUTS]),
    "insert_unshard": _contract([COLLECTIVES], [GATHERS]),
    "stage_quantized": _contract([MXFP8, GATHERS], [COPIES]),
    "insert_reshard": _contract([GATHERS], [RELEASES]),
    "insert_reduce_scatter": _contract([GRADIENT_OUTPUTS], [REDUCTIONS], [GRADIENT_OUTPUTS]),
    "insert_all_reduce": _contract([REDUCTIONS], [REPLICAS]),
    "write_gradients": _contract([REDUCTIONS]),
}
"""Passes that are not listed need nothing, and nothing needs them."""

GIVEN = {"backward": frozenset({GRADIENT_OUTPUTS})}
"""What holds before the first pass."""

_STEP = frozenset({COLLECTIVES, GATHERS, COPIES, RELEASES})
NEXT = {
    "joint": ("partition", frozenset({VIEWS})),
    "forward": ("order_prefetch", _STEP),
    "backward": ("order_prefetch", _STEP | {REDUCTIONS, REPLICAS}),
    "eval": ("order_prefetch", _STEP),
}
"""What follows each list, and the facts that it requires."""


def check_contracts(lists: Mapping[str, Iterable[str]]) -> None:
    """Raise :class:`ConfigError` at the first pass that lacks something; ``lists``: names of passes by graph."""
    joint = facts_after(lists.get("joint", ()), frozenset())
    for where, names in lists.items():
        facts = GIVEN.get(where, frozenset()) | (joint if where in ("forward", "backward") else frozenset())
        for name in names:
            _check(where, name, CONTRACTS.get(name, Contract()).requires - facts)
            facts = facts_after([name], facts)
        if where in NEXT:
            follows, requires = NEXT[where]
            _check(where, follows, requires - facts)


def facts_after(names: Iterable[str], facts: frozenset[str]) -> frozenset[str]:
    for name in names:
        contract = CONTRACTS.get(name, Contract())
        facts = (facts - contract.ends) | contract.provides
    return facts


def _check(where: str, name: str, lacking: frozenset[str]) -> None:
    for fact in REASONS:
        if fact in lacking:
            source = next((each for each, contract in CONTRACTS.items() if fact in contract.provides), None)
            advice = f" {source!r} provides that: it can be moved or replaced, but not dropped" if source else ""
            raise ConfigError(
                f"on the {where} graph the pass {name!r} lacks {fact}, which hold nowhere before it: {REASONS[fact]}."
                f"{advice}"
            )
