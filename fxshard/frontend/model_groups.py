"""Which process groups a captured model communicates in: looked up while they exist, for passes that know none."""

from __future__ import annotations

from torch import fx

from fxshard._torch import private
from fxshard.plan.model_groups import labelled
from fxshard.schedule.collectives import GROUP


def note_groups(graph: fx.Graph) -> None:
    """Note on each collective of the model's own how a schedule calls its group, and where its ranks lie."""
    starts = [node for node in graph.nodes if private.collective_name(node) is not None]
    found = [private.group_ranks(private.collective_group(node)) for node in starts]
    groups = labelled(found)
    for node, (name, _, _) in zip(starts, found, strict=True):
        node.meta[GROUP] = groups[name]
