"""Rules for quantized parameters: staging buffers that share memory with gradients, and copies that travel."""

from __future__ import annotations

from fxshard.planner.gather_modes import Gather
from fxshard.schedule.events import Kind
from fxshard.schedule.step import WRITE, Step


def staging_and_gradients_take_turns(step: Step) -> None:
    """Between a staged gather and its wait nothing takes, writes or holds the gradients that share its memory.

    The staging write is part of the gather, so what is gathered is what was staged, whatever cleared gradients before.
    """
    rule = staging_and_gradients_take_turns
    for index in (index for index in step.trails if step.bucket(index).staged):
        held: dict[str, int] = {}  # {parameters or gradients: the event since which they are in that memory}
        for i, what in step.trails[index]:
            held.pop(_LEAVES.get(what, ""), None)
            if what == Kind.UNSHARD and _GRADIENTS in held:
                step.broken(rule, i, f"stages parameters where event {held[_GRADIENTS]} holds gradients")
            if what in (Kind.GRAD, WRITE) and _PARAMETERS in held:
                step.broken(rule, i, f"writes gradients where event {held[_PARAMETERS]} has staged parameters")
            if what in _ENTERS:
                held[_ENTERS[what]] = i


_PARAMETERS, _GRADIENTS = "parameters", "gradients"
_ENTERS: dict[str, str] = {Kind.UNSHARD: _PARAMETERS, Kind.GRAD: _GRADIENTS}
_LEAVES: dict[str, str] = {Kind.WAIT: _PARAMETERS, Kind.FINISH: _GRADIENTS}


def staging_keeps_to_its_bytes(step: Step) -> None:
    """A staging buffer in the arena is as long as its bucket: it is written, gathered and cleared as a whole."""
    for i, event in step.schedule.of(Kind.UNSHARD):
        bucket = step.bucket(event.bucket_index)
        if bucket.staged_in_arena and event.slot is not None and event.slot.bytes != bucket.gathered_bytes:
            what = f"stages {bucket.gathered_bytes} bytes in a place of {event.slot.bytes}, and would clear all of it"
            step.broken(staging_keeps_to_its_bytes, i, what)


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
                if not brought.covers(copies):
                    step.broken(rule, i, f"wants {copies.value}, but event {gathered} brings {brought.value}")
