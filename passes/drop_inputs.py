"""After scheduling: inputs for parameters of layers that were not traced.

Requires ``insert_unshard`` and ``insert_reduce_scatter``, after which parameters are read from their buckets and their
gradients are written there. A program is called with what AOTAutograd traced. So the inputs for parameters that it has
not seen go, as does what forward would save of them for backward, and their places among backward's results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from fxshard.schedule.events import Phase
from fxshard.schedule.params import GRADS, PARAM, ParamRef


def drop_inputs(graphs: Mapping[Phase, fx.GraphModule], dropped: Collection[ParamRef], outputs: int | None) -> None:
    """Drop them from all graphs of a step, in place. ``outputs``: results of forward that are not saved."""
    for phase, module in graphs.items():
        end = module.graph.output_node()
        results = list(end.args[0])  # type: ignore[arg-type]
        described = list(end.meta.get("desc", [None] * len(results)))
        if phase is Phase.BACKWARD:
            kept = [i for i, ref in enumerate(end.meta[GRADS]) if ref not in dropped]
            end.meta[GRADS] = tuple(end.meta[GRADS][i] for i in kept)
        else:
            saved_from = len(results) if outputs is None else outputs
            kept = [i for i, result in enumerate(results) if i < saved_from or not _is_dropped(result, dropped)]
        end.args = (tuple(results[i] for i in kept),)
        if "desc" in end.meta:
            end.meta["desc"] = [described[i] for i in kept]
        for node in module.graph.find_nodes(op="placeholder"):
            if _is_dropped(node, dropped):
                module.graph.erase_node(node)
        module.recompile()


def _is_dropped(node: object, dropped: Collection[ParamRef]) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and node.meta.get(PARAM) in dropped
