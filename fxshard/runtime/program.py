"""A program: a lowered graph as a flat list of instructions over registers, bound to an engine.

Running it is a loop over callables. A value is dropped from its register by the instruction that uses it last, and is
handed to a compiled segment in a list which that segment empties: activations die inside the segment that reads them
last, not after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.runtime.engine import Engine
from fxshard.runtime.hollow import is_hollow
from fxshard.runtime.reductions import Needs
from fxshard.runtime.replay import Take
from fxshard.schedule.events import Event, Kind, Phase
from fxshard.schedule.profile import Key

BoxedCallable = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Instruction:
    """A compiled segment, or an event that the engine carries out: one of ``segment`` and ``event`` is given.

    An event of the model's own communication has both: its operator is the segment.

    It is called with the values of ``inputs``; what it returns goes into ``outputs``; ``dead`` is forgotten.
    """

    segment: BoxedCallable | None
    event: Event | None
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...] | None
    dead: tuple[int, ...]
    label: str
    key: Key | None = None
    """Under what a profile records it."""
    zeros: tuple[int, ...] = ()
    """Of a ``GRAD`` event: parameters that nothing will write."""
    needs: Needs = ()
    """Of a ``GRAD`` event: parameters whose gradients depend on some of forward's results, and not on others."""


@dataclass(frozen=True)
class Lowered:
    """One phase of a step, compiled, and not tied to any memory yet."""

    phase: Phase
    instructions: tuple[Instruction, ...]
    registers: int
    returns: tuple[int | None, ...]
    unused_inputs: tuple[int, ...]
    arena_bytes: int
    visible: int | None
    """How many of its results are the caller's; the others are saved for backward. None: all of them."""
    changes_on_host: bool
    """Whether it makes values on the host while it runs, which a capture would not repeat."""
    carries: Mapping[int, Event]
    """The gathers that an optimizer step starts for the next forward, by bucket."""
    host_bytes: int = 0
    """What it offloads."""

    @property
    def leaves_out(self) -> list[str]:
        """The parameters of buckets it reduces that may get no gradient."""
        return [
            instruction.event.params[position]
            for instruction in self.instructions
            if instruction.event is not None
            for position in (*instruction.zeros, *(position for position, _ in instruction.needs))
        ]


_Bound = tuple[BoxedCallable, Instruction]
"""An instruction, and what it calls."""


class Program:
    """One phase of a step, ready to run. It takes its arguments in a list, and empties it."""

    def __init__(
        self, lowered: Lowered, engine: Engine, before_first_run: Callable[[], None] | None, owner: object
    ) -> None:
        self.phase = lowered.phase
        self.visible = lowered.visible
        self.takes: dict[Hashable, Take] = {}
        """What was captured of it, by what it found when it started."""
        self.captures = 0
        self.changes_on_host = lowered.changes_on_host
        self.unused_inputs = lowered.unused_inputs
        self.owner = owner
        self.runs = 0
        self.needs_losses = any(instruction.needs for instruction in lowered.instructions)
        """Whether which gradients there are depends on the results of forward that a loss uses."""
        self.without_loss: frozenset[int] = frozenset()
        """Of a backward that is about to run: the results of forward, by number, that have no gradient."""
        events = [each.event for each in lowered.instructions if each.event is not None]
        self._reads = sorted({event.bucket_index for event in events if event.kind is Kind.WAIT})
        self._before_first_run = before_first_run
        self._engine = engine
        self._arena_bytes = lowered.arena_bytes
        self._carries = lowered.carries
        self.host_bytes = lowered.host_bytes
        self._registers = lowered.registers
        self._returns = lowered.returns
        self._instructions = [(each.segment or self._action(each), each) for each in lowered.instructions]
        gradients = engine.gradients
        self._accumulating = self._without_reducing(
            {Kind.REDUCE: gradients.accumulate, Kind.FINISH: gradients.put_back}
        )
        """The same inside ``no_sync``: gradients are kept where they would be reduced."""
        self._for_inputs = self._without_reducing({Kind.FINISH: gradients.discard})
        """The same where gradients of parameters are not asked for."""

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        with contextlib.ExitStack() as frame:
            if self._engine.observed:
                frame.enter_context(private.no_observers())
            if torch.is_inference_mode_enabled():
                # Memory that outlives this call must not be made in inference mode: training could not write to it.
                frame.enter_context(torch.inference_mode(False))
                frame.enter_context(torch.no_grad())
            return self._run(args)

    def _run(self, args: list[Any]) -> tuple[Any, ...]:
        engine = self._engine
        if self._before_first_run is not None:
            self._before_first_run()
            self._before_first_run = None
        stores = self.phase is not Phase.BACKWARD or private.backward_reaches(is_hollow)
        if self.phase is Phase.BACKWARD and stores:
            self._refuse_frozen()
        engine.begin(self.phase, self._arena_bytes, self.owner, self._carries)
        engine.gradients.without_loss, self.without_loss = self.without_loss, frozenset()
        engine.gradients.stores = stores
        results = self.run_through(args) if engine.replays is None else engine.replays.run(engine, self, args)
        engine.gradients.publishing.publish()
        return results

    def _refuse_frozen(self) -> None:
        trained = (named for bucket in self._engine.buckets if bucket.plan.trainable for named in bucket.named())
        for name, parameter in trained:
            if not parameter.requires_grad:
                raise StateError(
                    f"{name!r} was frozen between a forward and its backward, which makes its gradient: freeze it on "
                    "the plain model, before fxshard.compile, or set parameter.grad = None after backward"
                )

    def run_through(self, args: list[Any]) -> tuple[Any, ...]:
        """Run every instruction; what fails half-way leaves nothing behind."""
        try:
            return self.execute(args)
        except BaseException:
            self._engine.abort()
            raise

    def execute(self, args: list[Any]) -> tuple[Any, ...]:
        """The instructions, one after the other."""
        engine = self._engine
        instructions = self._instructions if engine.gradients.synchronises else self._accumulating
        if not engine.gradients.stores:
            instructions = self._for_inputs
        recorder = engine.recorder
        registers: list[Any] = [*args, *[None] * (self._registers - len(args))]
        args.clear()
        for i in self.unused_inputs:
            registers[i] = None
        ranges = private.profiling()
        for run, instruction in instructions:
            values = [registers[i] for i in instruction.inputs]
            for i in instruction.dead:
                registers[i] = None
            if recorder is not None:
                results = recorder.run(instruction.key, run, values)
            elif ranges:
                with torch.profiler.record_function(instruction.label):
                    results = run(values)
            else:
                results = run(values)
            if instruction.outputs is not None:
                for register, result in zip(instruction.outputs, results, strict=True):
                    if register is not None:
                        registers[register] = result
                del results
        engine.end()
        self.runs += 1
        return tuple(registers[i] if i is not None else None for i in self._returns)

    def versions(self) -> list[tuple[int, int]]:
        """Of each bucket that the program reads: its optimizer steps and loaded checkpoints, and all changes of it."""
        return [(self._engine.buckets[index].steps, self._engine.buckets[index].version) for index in self._reads]

    def refuse_changed(self, versions: list[tuple[int, int]]) -> None:
        """Of a backward: raise if what it reads was changed since its forward, which ended with ``versions``."""
        now = self.versions()
        if now == versions:
            return
        pairs = list(zip(self._reads, now, versions, strict=True))
        changed = [self._engine.buckets[index].plan.name for index, here, then in pairs if here != then]
        some = ", ".join(changed[:3]) + ", …" * (len(changed) > 3)
        stepped = any(here[0] != then[0] for _, here, then in pairs)
        before = (
            "of a forward that ran before the last optimizer.step(), or before a checkpoint was read, which"
            if stepped
            else "of a forward that ran before an operation in place (below torch.no_grad()) that"
        )
        raise StateError(
            f"backward() {before} changed parameters that this backward reads ({some}): "
            "gradients would be those of neither the old nor the new values. Call backward() for every loss before "
            "that, or run the forward again after it"
        )

    def boxed(self) -> BoxedCallable:
        """The program as AOTAutograd wants it: a function that says it takes its arguments in a list."""

        def run(args: list[Any]) -> tuple[Any, ...]:
            return self(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _without_reducing(self, instead: Mapping[Kind, Callable[[int], None]]) -> list[_Bound]:
        """The instructions with something else ``instead`` of those that reduce gradients, or nothing."""
        chosen: list[_Bound] = []
        for run, instruction in self._instructions:
            event = instruction.event
            if event is None or event.kind not in (Kind.REDUCE, Kind.ALL_REDUCE, Kind.FINISH):
                chosen.append((run, instruction))
            elif event.kind in instead:
                act, index = instead[event.kind], event.bucket_index
                what = Kind.ACCUMULATE if event.kind is Kind.REDUCE else event.kind
                other = lambda _, act=act, index=index: act(index)  # noqa: E731
                chosen.append((other, replace(instruction, label=f"{what} {event.bucket}")))
        return chosen

    def _action(self, instruction: Instruction) -> BoxedCallable:
        """What the engine does for an event."""
        event, zeros, needs = instruction.event, instruction.zeros, instruction.needs
        assert event is not None
        engine, index, slot = self._engine, event.bucket_index, event.slot
        gradients, offloads = engine.gradients, engine.offloads
        actions: dict[Kind, Callable[[list[Any]], Any]] = {
            Kind.UNSHARD: lambda _: engine.unshard(index, slot, event.copies),
            Kind.WAIT: lambda _: engine.wait(index, slot, event.copies),
            Kind.RESHARD: lambda _: engine.reshard(index),
            Kind.GRAD: lambda _: gradients.grad(index, slot, zeros, needs),
            Kind.REDUCE: lambda _: gradients.reduce(index),
            Kind.ALL_REDUCE: lambda _: gradients.all_reduce(index),
            Kind.FINISH: lambda _: gradients.finish(index),
            Kind.OFFLOAD: lambda values: offloads.offload(values, event, self.host_bytes),
            Kind.RELEASE: lambda values: offloads.release(values, event),
            Kind.RELOAD: offloads.reload,
            Kind.RESTORE: offloads.restore,
        }
        return actions[event.kind]
