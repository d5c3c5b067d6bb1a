"""Step: the graphs become what was decided about them, once.

Requires the :class:`Decisions` about the events of the same graphs. Moves every ``unshard`` to where it shall start,
removes runtime nodes that shall go, and gives all others their records, with reasons and slots.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxshard.passes.decide import Decisions
from fxshard.passes.timeline import START, Gather
from fxshard.schedule.events import META, Phase, events
from fxshard.schedule.graph_summary import unpacks


def apply_decisions(modules: Mapping[Phase, fx.GraphModule], decisions: Decisions) -> None:
    """In place."""
    for part in decisions.timeline.phases:
        module = modules[part.phase]
        nodes = [node for node, _ in events(module.graph)]
        last: dict[int, fx.Node] = {}  # {runtime node: the last gather after it}
        for entry in part.entries:
            node = nodes[entry.node]
            node.meta[META] = entry.event
            if isinstance(entry, Gather):
                _put_after(node, last.get(entry.after, nodes[entry.after] if entry.after != START else None))
                last[entry.after] = node
        for number in {*range(len(nodes))} - {entry.node for entry in part.entries}:
            module.graph.erase_node(nodes[number])
        module.graph.lint()
        module.recompile()


def _put_after(launch: fx.Node, anchor: fx.Node | None) -> None:
    """Move a node after another and what unpacks that one; without another, to the start of the graph."""
    if anchor is None:
        first = next(node for node in launch.graph.nodes if node.op not in ("placeholder", "get_attr"))
        if launch is not first:
            first.prepend(launch)
        return
    while anchor.next is not launch and unpacks(anchor.next):
        anchor = anchor.next
    if anchor.next is not launch:
        anchor.append(launch)
