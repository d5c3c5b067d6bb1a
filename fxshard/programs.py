"""From scheduled graphs to what runs: split at their events, compiled by segments, bound to the runtime.

Segments are handed out to other processes as soon as they are known, if there are any. A program is made when it first
runs: until then those have time, and what AOTAutograd and Dynamo do behind a compilation does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import finalize

import torch
from torch import fx

from fxshard import _compat
from fxshard.events import Event, Kind, Phase
from fxshard.helpers import beside
from fxshard.helpers.crew import dismiss, hired
from fxshard.helpers.first_step import put_off
from fxshard.helpers.known import note_run
from fxshard.inspect.observe import Observer
from fxshard.inspect.schedule import Schedule
from fxshard.lowering import BoxedCallable
from fxshard.passes.context import PassContext
from fxshard.passes.split_segments import split_segments
from fxshard.runtime.agreement import COMMUNICATION
from fxshard.runtime.later import later
from fxshard.runtime.program import Program, segments
from fxshard.scheduled import Scheduled
from fxshard.sharding import Sharding


class Programs:
    """The programs of one captured graph."""

    def __init__(self, sharding: Sharding, scheduled: Scheduled, context: Callable[[Phase], PassContext]) -> None:
        self._sharding = sharding
        self._scheduled = scheduled
        self._context = context
        self._splits = dict(scheduled.splits)
        self._owner = object()
        self.rest: Callable[[], None] | None = None
        """What is left to do when a step has been taken."""

    @property
    def _observer(self) -> Observer | None:
        return self._context(Phase.FORWARD).observer

    def hand_out(self) -> None:
        """Let other processes begin to compile all segments, if there are any processes; wait for nothing."""
        crew = hired()
        if crew is None:
            return
        if self._sharding.options.lowering != "inductor":
            dismiss()
            return
        with _compat.no_dispatch_modes(), _nobody_left_on_failure():
            self._sharding.compiler.hand_out(crew, [segments(split) for split in self.splits().values()])

    def program(self, phase: Phase, emitted: Schedule) -> BoxedCallable:
        """What runs one phase, made when it first does. ``emitted`` is what it will do."""
        last = phase is Phase.BACKWARD
        return later(lambda: self._make(phase, emitted), f"the {phase} graph", self._begin_the_rest if last else None)

    def splits(self) -> dict[Phase, fx.GraphModule]:
        """The graphs cut into segments."""
        return {phase: self._split(phase) for phase in self._scheduled.graphs}

    def _begin_the_rest(self) -> None:
        """Behind the first backward."""
        if self.rest is not None:
            put_off(self._do_the_rest) if self._sharding.own_optimizer else beside.behind(self._do_the_rest)

    def _do_the_rest(self) -> None:
        rest, self.rest = self.rest, None
        if rest is not None:
            rest()

    def _make(self, phase: Phase, emitted: Schedule) -> BoxedCallable:
        with _nobody_left_on_failure():
            beside.finish()
            self._sharding.compiler.look_around()
            crew = hired()
            if crew is not None:
                self._sharding.compiler.finish(crew, segments(self._split(phase)))
            program = self._program(phase, emitted).boxed()
        if phase is Phase.BACKWARD and crew is not None and self._may_stay():
            finalize(self, dismiss, crew)
        elif phase is not Phase.FORWARD:  # nothing is left to compile
            dismiss()
        if phase is Phase.BACKWARD and self._sharding.options.lowering == "inductor":
            note_run()
        return program

    def _may_stay(self) -> bool:
        """Whether those who compiled may stay until the optimizer has made its first step, which says that they may go,
        or the model is dropped.

        Each has a CUDA context. Whoever asks the driver for memory or loads a kernel waits while these are taken down,
        and a first backward does both. Their memory is not missed where as much is free as is in use: what is still to
        come is gradients, and buffers of backward's.
        """
        device = self._sharding.engine.device
        if not self._sharding.own_optimizer or device.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(device)
        return free > torch.cuda.memory_allocated(device)

    def _program(self, phase: Phase, emitted: Schedule) -> Program:
        engine, compiler = self._sharding.engine, self._sharding.compiler
        forward = phase is Phase.FORWARD

        def agree() -> None:
            # Before the first run, not while compiling: collectives under a compiler's dispatch modes can deadlock.
            self._sharding.agreement.check(COMMUNICATION, emitted.communication())

        program = Program(
            self._split(phase),
            phase,
            engine,
            self._scheduled.memory.bytes,
            compiler,
            agree if phase is not Phase.BACKWARD else None,
            self._owner,
            _carries(emitted) if forward else None,
            self._scheduled.outputs if forward else None,
        )
        if self._observer is not None:
            so_far = "%s: lowered by %s; so far %d segments of the model, %d of them compiled"
            self._observer.say(so_far, phase, compiler.lowering, compiler.segments, compiler.compilations)
        return program

    def _split(self, phase: Phase) -> fx.GraphModule:
        if phase not in self._splits:
            graph = self._scheduled.graphs[phase]
            watch = self._observer.begin(phase, "split_segments", graph) if self._observer is not None else None
            self._splits[phase] = split_segments(graph, self._context(phase))
            if watch is not None:
                watch.done(self._splits[phase])
        return self._splits[phase]


def _carries(emitted: Schedule) -> dict[int, Event]:
    """The gathers that an optimizer step starts for the next forward."""
    return {event.bucket_index: event for _, event in emitted.of(Kind.UNSHARD, phase=Phase.OPTIMIZER)}


@contextmanager
def _nobody_left_on_failure() -> Iterator[None]:
    """Whatever fails, no process is left that waits for more to compile."""
    try:
        yield
    except BaseException:
        dismiss()
        raise
