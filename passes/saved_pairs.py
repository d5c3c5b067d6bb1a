"""Which result of forward is which input of backward."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxshard._torch import private


def saved_pairs(forward: fx.Graph, backward: fx.Graph, outputs: int) -> list[tuple[Any, fx.Node]]:
    """(what forward saves, what backward takes), in the order of backward's inputs.

    Forward returns sizes after tensors, as AOTAutograd wants them, and backward takes them first. ``outputs``: results
    of forward that are not saved.
    """
    results: Any = forward.output_node().args[0]
    sizes_first = sorted(results[outputs:], key=lambda saved: not private.is_size(saved))
    return list(zip(sizes_first, backward.find_nodes(op="placeholder"), strict=False))
