"""Collectives that a model makes itself: torch's functional ones, as they stand in a captured graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fxshard._torch.private.nodes import operator_of

GROUP = "group_name"
"""The argument of a functional collective that names its process group."""


_COLLECTIVES: dict[int, tuple[torch._ops.OpOverload, str | None]] = {}
"""Names of operators that start a collective, by their identity: every node is asked, and their own hash is slow."""


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a functional collective. torch 2.11, 2.13."""
    target = operator_of(node)
    return target is not None and target.namespace == "_c10d_functional" and target._opname == "wait_tensor"


def collective_name(node: fx.Node) -> str | None:
    """``all_reduce``, ``all_to_all_single``, … where a node starts a functional collective. torch 2.11, 2.13."""
    target = operator_of(node)
    if target is None:
        return None
    if id(target) not in _COLLECTIVES:
        own = target.namespace in ("_c10d_functional", "_dtensor")
        named = own and any(argument.name == GROUP for argument in target._schema.arguments)
        _COLLECTIVES[id(target)] = target, target._opname if named else None
    return _COLLECTIVES[id(target)][1]


COALESCED = {
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
}
"""Functional collectives of a list of tensors: what does the same for one. The other arguments are alike."""


def split_coalesced(graph: fx.Graph) -> None:
    """Make one collective for each tensor of those that take several, in their order. torch 2.11, 2.13."""
    for node in list(graph.nodes):
        single = COALESCED.get(collective_name(node) or "")
        if single is None:
            continue
        operator = getattr(torch.ops._c10d_functional, single).default
        tensors, *rest = node.args
        made = []
        with graph.inserting_before(node):
            for i, tensor in enumerate(tensors):
                made.append(graph.call_function(operator, (tensor, *rest), node.kwargs))
                kept = {key: value for key, value in node.meta.items() if key != "tensor_meta"}
                made[i].meta = {**kept, "val": node.meta["val"][i]}
        for user in list(node.users):  # each takes one of the results
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def is_synchronous(node: fx.Node) -> bool:
    """Whether a collective is over when its operator returns: DTensor's own all-to-all is. torch 2.11, 2.13."""
    target = operator_of(node)
    return target is not None and target.namespace == "_dtensor"


def collective_group(node: fx.Node) -> Any:
    """The process group of a functional collective, or its name. torch 2.11, 2.13."""
    target = operator_of(node)
    assert target is not None
    places = [argument.name for argument in target._schema.arguments]
    position = places.index(GROUP)
    return node.args[position] if position < len(node.args) else node.kwargs[GROUP]


def group_ranks(group: Any) -> tuple[str, str, tuple[int, ...]]:
    """Name, description and ranks of a process group, which may be given by its name. torch 2.11, 2.13."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    found = _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
    return found.group_name, found.group_desc, tuple(dist.get_process_group_ranks(found))


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is the first and no other exists: nothing is sent.

    It is gone after the block. torch 2.11, 2.13.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
