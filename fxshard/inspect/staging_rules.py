"""What must hold for quantized parameters: staging buffers that share memory with gradients, and copies that travel."""

from __future__ import annotations

from fxshard.events import Kind
from fxshard.inspect.step import WRITE, Step
from fxshard.precision.modes import Gather


def staging_and_gradients_take_turns(step: Step) -> None:
    """Between a staged gather and its wait nobody takes, writes or holds the gradients that share its memory.

    The staging write is part of the gather, so what is gathered is what was staged, whoever cleared gradients before.
    """
    rule = staging_and_gradients_take_turns
    for index, trail in step.trails.items():
        if not step.bucket(index).staged:
            continue
        staged = taken = None
        for i, what in trail:
            if what == Kind.UNSHARD:
                if taken is not None:
                    step.broken(rule, i, f"stages parameters where event {taken} holds gradients")
                staged = i
            elif what == Kind.WAIT:
                staged = None
            elif what in (Kind.GRAD, WRITE) and staged is not None:
                step.broken(rule, i, f"writes gradients where event {staged} has staged parameters")
            taken = i if what == Kind.GRAD else None if what == Kind.FINISH else taken


def waits_get_their_copies(step: Step) -> None:
    """A wait for quantized parameters gives copies that its gather brought, and a gather brings some."""
    rule = waits_get_their_copies
    for index, trail in step.trails.items():
        if step.bucket(index).gather is not Gather.DIRECT:
            continue
        gathered = step.carried.get(index)
        for i, what in trail:
            copies = step.event(i).copies
            if what == Kind.UNSHARD:
                gathered = i
                if not copies.number or step.event(i).bytes != copies.number * step.bucket(index).gathered_bytes:
                    step.broken(
                        rule, i, f"moves {step.event(i).bytes} bytes, but is to bring {copies.value or 'nothing'}"
                    )
            elif what == Kind.WAIT and gathered is not None:
                brought = step.event(gathered).copies
                if (copies.rowwise and not brought.rowwise) or (copies.columnwise and not brought.columnwise):
                    step.broken(rule, i, f"wants {copies.value}, but event {gathered} brings {brought.value}")
