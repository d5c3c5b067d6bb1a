"""A program that ran before is captured as a whole, and from then on replayed: one launch in place of thousands.

What is captured is bound to addresses and to what the engine held when the program started. A *take* therefore belongs
to what the program found (``transition.entry``); where nothing captured fits, the program runs through, instruction by
instruction, as it does without this option. All takes share one memory pool. So at any time at most one captured
forward may have activations in it: the next one is replayed only when autograd has released them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fxshard._torch import private
from fxshard._torch.errors import CaptureError, ConfigError, FxshardError, StateError
from fxshard._torch.log import LOG
from fxshard.runtime.cuda_tape import CudaTape, Place
from fxshard.runtime.hollow import address, is_hollow
from fxshard.runtime.transition import Transition, Watching, entry, hindrance, prepare
from fxshard.schedule.events import Phase

if TYPE_CHECKING:
    from fxshard.passes.options import Options
    from fxshard.runtime.engine import Engine
    from fxshard.runtime.program import Program

CAPTURES = 8
"""Of one program: one that meets something new at every step is not captured for ever."""
MISSES = 2
"""So many times in a row must a forward be replayed whose backward is not captured, for both to be captured again."""


def check_capturable(options: Options, device: torch.device) -> None:
    """Refuse ``cuda_graphs`` where nothing can be captured."""
    if options.cuda_graphs and device.type != "cuda":
        raise ConfigError(f"cuda_graphs=True: the model is on {device.type!r}; only work on a CUDA device is captured")
    if options.cuda_graphs and not options.debug.arena:
        raise ConfigError("cuda_graphs=True needs arena=True: what is captured gathers to the same addresses each time")


@dataclass(frozen=True)
class Captures:
    """What ``cuda_graphs`` has done so far."""

    captured: int
    """Graphs: as a rule one for forward and one for backward, for each shape of input."""
    replayed: int
    run_through: dict[str, int]
    """How often a program ran instruction by instruction instead, by reason."""
    pool_bytes: int
    """What the graphs' memory pool holds of the device's memory, whatever the allocator says is in use."""
    idle_bytes: int
    """How much of that the allocator counts as free, although every replay uses it."""


@dataclass
class Misses:
    """How many of a forward's last replays had a backward that no capture fitted."""

    count: int = 0


@dataclass
class Take:
    """One capture of a program."""

    replay: Callable[[], None]
    inputs: tuple[torch.Tensor | None, ...]
    """Where data is copied to before a replay; None for what is at a fixed address, or not used."""
    outputs: tuple[Any, ...]
    """Places of what it computes; values that are the same each time as they are."""
    left: Transition
    misses: Misses = field(default_factory=Misses)
    _tensors: list[Any] | None = field(default=None, repr=False)

    def results(self, tape: CudaTape) -> list[Any]:
        """What the last replay computed, as tensors that own no memory: the same ones each time."""
        if self._tensors is None:
            self._tensors = [tape.tensor_at(out) if isinstance(out, Place) else out for out in self.outputs]
        return list(self._tensors)


class Loan:
    """Activations of a captured forward, held by autograd until its backward.

    They own no memory (or, after a capture, memory that backward's capture is to free), so one of them gets a storage
    of its own: as long as that lives, autograd needs them all.
    """

    def __init__(self, saved: list[Any], misses: Misses, captured: bool) -> None:
        self.misses = misses
        self.captured = captured
        """Whether forward was captured just now: only then is the pool in a state in which backward can be."""
        self.reading = False
        """Whether its backward runs through just now."""
        first = next(i for i, value in enumerate(saved) if _has_memory(value))
        self.addresses = frozenset(address(value) for value in saved if isinstance(value, torch.Tensor)) - {0}
        self._anchor: torch.Tensor | None = saved[first]
        saved[first] = private.same_memory(saved[first])
        self._storage = private.StorageReference(saved[first])

    def needed(self) -> bool:
        """Whether the activations may still be read."""
        return self.reading or not self._storage.expired()

    def claim(self, args: list[Any]) -> bool:
        """Take the activations out of autograd's hands. False if it keeps them, for another backward."""
        mine = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor) and self._storage.is_of(value)]
        for i in mine:
            args[i] = None
        given_back = self._storage.expired()
        anchor = self._anchor
        if given_back:
            self._anchor = None  # or it would outlive its last use in backward
        for i in mine:
            args[i] = anchor
        return given_back


class Replays:
    """The captured programs of one engine: which take fits, and whether the memory they share is still needed."""

    def __init__(self, tape: CudaTape) -> None:
        self._tape = tape
        self._loan: Loan | None = None
        self._deleted = False
        self.captured = 0
        self.replayed = 0
        self.run_through: Counter[str] = Counter()
        """How often programs ran through, by reason."""

    def run(self, engine: Engine, program: Program, args: list[Any]) -> tuple[Any, ...]:
        """Replay a program that has begun, or capture it, or run it through."""
        given = list(args)
        args.clear()
        prepare(engine, program.phase)  # while activations are still known to lie where gradients live
        claimed = self._claim(given) if program.phase is Phase.BACKWARD else None
        for i in program.unused_inputs:
            given[i] = None
        why = self._hindrance(engine, program, given, claimed)
        if why is None:
            addresses = claimed.addresses if isinstance(claimed, Loan) else frozenset()
            key = (entry(engine), tuple(_kind(value, addresses) for value in given))
            take = program.takes.get(key)
            if take is not None and take.misses.count < MISSES:
                if isinstance(claimed, Loan):
                    claimed.misses.count = 0
                return self._replay(engine, program, take, given)
            why = self._cannot_capture(program, claimed)
            if why is None:
                return self._capture(engine, program, key, given, addresses)
        return self._run_through(program, given, claimed, why)

    def report(self) -> Captures:
        """What was done so far. Looks through the allocator's memory: not for every step."""
        size, used = self._tape.pool_bytes()
        return Captures(self.captured, self.replayed, dict(self.run_through), size, size - used)

    def delete(self) -> None:
        """Let go of all captured programs; from now on every program runs through."""
        if self.closed():
            raise StateError(
                "delete_cuda_graphs: a backward still needs what a captured forward saved; run it, or let go of its "
                "loss, first"
            )
        self._loan, self._deleted = None, True
        self._tape.delete()

    # -- which of the three ------------------------------------------------------------------------------------------

    def _claim(self, given: list[Any]) -> Loan | str:
        """The activations that a backward was given, if a captured forward made them; else why not."""
        loan = self._loan
        addresses = {address(value) for value in given if isinstance(value, torch.Tensor)}
        if loan is None or not loan.addresses <= addresses:
            return "its forward ran through"
        return loan if loan.claim(given) else "autograd keeps the activations (retain_graph)"

    def _hindrance(self, engine: Engine, program: Program, given: list[Any], claimed: Loan | str | None) -> str | None:
        """Why a program runs through, whatever was captured."""
        if self._deleted:
            return "delete_cuda_graphs was called"
        if isinstance(claimed, str):
            return claimed
        if program.runs == 0:
            return "a first run compiles and loads kernels"
        if program.changes_on_host:
            return "it draws random numbers on the host, or copies to it"
        if self._tape.busy():
            return "another capture is under way"
        if claimed is None and self._loan is not None and self._loan.needed():
            return "activations of an earlier forward are still needed"
        addresses = claimed.addresses if claimed is not None else frozenset()
        if not all(self._takes(value, addresses) for value in given):
            return "an input is no tensor on the device"
        return hindrance(engine)

    def _takes(self, value: Any, addresses: frozenset[int]) -> bool:
        if value is None or is_hollow(value):
            return True
        return isinstance(value, torch.Tensor) and (
            value.device == self._tape.device or value.numel() == 0 or value.data_ptr() in addresses
        )

    def _cannot_capture(self, program: Program, claimed: Loan | str | None) -> str | None:
        if isinstance(claimed, Loan) and not claimed.captured:
            claimed.misses.count += 1
            return "its forward was replayed, and nothing captured fits"
        return f"it was captured {CAPTURES} times" if program.captures >= CAPTURES else None

    def closed(self) -> bool:
        """Whether activations lie where gradients live."""
        return self._loan is not None and self._loan.needed()

    def _run_through(self, program: Program, given: list[Any], claimed: Loan | str | None, why: str) -> tuple[Any, ...]:
        if not self.run_through[why]:
            LOG.info("cuda_graphs: %s runs through: %s", program.phase, why)
        self.run_through[why] += 1
        if not isinstance(claimed, Loan):
            return program.run_through(given)
        claimed.reading = True
        try:
            return program.run_through(given)
        finally:
            self._loan = None

    # -- capturing and replaying -------------------------------------------------------------------------------------

    def _capture(
        self, engine: Engine, program: Program, key: Hashable, given: list[Any], addresses: frozenset[int]
    ) -> tuple[Any, ...]:
        self._loan = None
        inputs = tuple(_own(value) if _is_data(value, addresses) else None for value in given)
        _put(inputs, given)
        args = [value if own is None else own for own, value in zip(inputs, given, strict=True)]
        given.clear()  # activations die inside the capture, so that gradients take their place
        engine.settle()
        if program.host_bytes:
            engine.offloads.reserve(program.host_bytes)
        watching = Watching(engine)

        def run() -> list[Any]:
            engine.frame.streams.fork()
            engine.rebase(engine.frame.streams.mark())
            results = list(program.execute(args))
            engine.frame.streams.join()
            return results

        engine.frame.capturing = True
        try:
            replay, results = self._tape.record(run)
        except BaseException as error:
            engine.frame.capturing = False
            watching.undo()
            if isinstance(error, RuntimeError) and not isinstance(error, (FxshardError, torch.OutOfMemoryError)):
                raise CaptureError(_uncapturable(program.phase, error)) from error
            raise
        engine.frame.capturing = False
        take = Take(replay, inputs, tuple(map(self._described, results)), watching.transition(self.closed))
        program.takes[key] = take
        program.captures += 1
        self.captured += 1
        LOG.info("cuda_graphs: captured %s (%d so far)", program.phase, self.captured)
        return self._launch(engine, program, take, results, captured=True)

    def _replay(self, engine: Engine, program: Program, take: Take, given: list[Any]) -> tuple[Any, ...]:
        self._loan = None
        _put(take.inputs, given)
        given.clear()
        engine.settle()
        program.runs += 1
        self.replayed += 1
        return self._launch(engine, program, take, take.results(self._tape), captured=False)

    def _launch(
        self, engine: Engine, program: Program, take: Take, results: list[Any], captured: bool
    ) -> tuple[Any, ...]:
        take.replay()
        replayed = engine.frame.streams.mark()
        engine.frame.watch(replayed, f"captured {program.phase}")
        take.left.apply(engine, replayed)
        visible = len(results) if program.visible is None else program.visible
        theirs = [value.clone() if isinstance(value, torch.Tensor) else value for value in results[:visible]]
        saved = results[visible:]
        if any(map(_has_memory, saved)):
            self._loan = Loan(saved, take.misses, captured)
        return (*theirs, *saved)

    def _described(self, value: Any) -> Any:
        return Place.of(value) if _has_memory(value) and value.device == self._tape.device else value


def _has_memory(value: Any) -> bool:
    """Whether a value is a tensor with memory, on the device or, offloaded, on the host."""
    return isinstance(value, torch.Tensor) and value.numel() > 0 and not is_hollow(value)


def _is_data(value: Any, addresses: frozenset[int]) -> bool:
    """Whether an input is to be copied to where a take reads it."""
    return _has_memory(value) and value.data_ptr() not in addresses


def _kind(value: Any, addresses: frozenset[int]) -> Hashable:
    """What a take depends on of an input: the shape of data, the address of what does not move."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.shape, value.stride(), value.dtype) if _is_data(value, addresses) else address(value)


def _own(value: torch.Tensor) -> torch.Tensor:
    """Memory for data of this kind. Not the data's own, which is allocated to others when the data is gone."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _put(inputs: Sequence[torch.Tensor | None], given: Sequence[Any]) -> None:
    with torch.no_grad():
        for own, value in zip(inputs, given, strict=True):
            if own is not None:
                _unexpanded(own).copy_(_unexpanded(value))


def _unexpanded(value: torch.Tensor) -> torch.Tensor:
    """A tensor without the repetitions that ``expand`` gave it, which torch refuses to write to."""
    for dim, stride in enumerate(value.stride()):
        if stride == 0:
            value = value.narrow(dim, 0, 1)
    return value


def _uncapturable(phase: Phase, error: BaseException) -> str:
    return (
        f"cuda_graphs=True: {phase} could not be captured in a CUDA graph. Something in it waits for the device, or "
        f"calls CUDA in a way that cannot be recorded: {str(error).splitlines()[0]}\nTake that out of the model, or "
        "compile it without cuda_graphs"
    )
