"""What a step gathers: bytes as its schedule says, and as the collectives got them."""

from collections import Counter
from typing import Any
from unittest import mock

import torch

import fxshard
from fxshard._torch import private
from fxshard.schedule.events import Kind, Phase

Bytes = dict[str, int]
"""By phase."""


def gathered(model: fxshard.ShardedModule, inputs: tuple[Any, ...], endings: tuple[str, ...]) -> tuple[Bytes, ...]:
    """Of the first forward and backward: planned, on the wire, and planned for parameters whose names end so."""
    planned, wire, of_some = Counter[str](), Counter[str](), Counter[str]()
    phase, gather = "forward", private.all_gather

    def counted(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wire[phase] += output.numel() * output.itemsize
        return gather(output, *args, **kwargs)

    with mock.patch.object(private, "all_gather", counted):
        loss = model(*inputs)
        phase = "backward"
        loss.backward()
    for _, event in model.schedule.of(Kind.UNSHARD):
        # What an optimizer step gathers is what the next forward starts with; the first forward gathers it itself.
        used_in = "backward" if event.phase is Phase.BACKWARD else "forward"
        planned[used_in] += event.bytes
        if any(name.endswith(endings) for name in event.params):
            of_some[used_in] += event.bytes
    return dict(planned), dict(wire), dict(of_some)
