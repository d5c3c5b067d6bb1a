"""What a program finds in the engine when it starts, and what it leaves there: a replay has to leave the same."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fxshard.runtime.home import Home
from fxshard.runtime.publishing import Written
from fxshard.runtime.streams import Token
from fxshard.schedule.events import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.runtime.engine import Engine, Gathered


def hindrance(engine: Engine) -> str | None:
    """Why what the engine is about to do depends on more than ``entry`` says."""
    if engine.recorder is not None:
        return "it is being profiled"
    if engine.gradients.alive or any(bucket.kept is not None for bucket in engine.buckets):
        return "gradients of no_sync() are not reduced yet"
    if not engine.gradients.stores:
        return "it is for gradients of inputs alone"
    if not engine.gradients.synchronises and any(b.reducing is not None for b in engine.buckets):
        return "no_sync() keeps gradients"
    if any(bucket.home is not None and not bucket.home.free_but_for(bucket.grad) for bucket in engine.buckets):
        return "gradients of an earlier step are still held"
    outside = (held for index, held in engine._gathered.items() if not engine.buckets[index].plan.resident)
    moved = (held.views is not None and held.slot is None for held in outside)
    return "a parameter was gathered for a program that has it in another place" if any(moved) else None


def entry(engine: Engine) -> Hashable:
    """Everything on the host that decides what a program starts, and where."""
    held = tuple(
        (index, each.slot, each.copies, each.views is None, each.version is None)
        for index, each in sorted(engine._gathered.items())
    )
    stale = tuple(bucket.stale for bucket in engine.buckets if bucket.plan.resident or bucket.copies is not None)
    grads = tuple(None if b.grad is None else (b.grad.data_ptr(), *b.with_gradient) for b in engine.buckets)
    gradients = (grads, engine.gradients.synchronises, engine.gradients.without_loss)
    return engine.arena.address, engine.frame.options.debug.overlap, held, stale, gradients


def prepare(engine: Engine, phase: Phase) -> None:
    """Do ahead of a program what it does to gradients that a user may have put anywhere."""
    if phase is Phase.BACKWARD:
        for bucket in engine.buckets:
            if bucket.plan.trainable:
                bucket.prepare_accumulation()


@dataclass(frozen=True)
class Transition:
    """What a run of a program changed on the host."""

    held: Mapping[int, Gathered]
    gathered: tuple[int, ...]
    """Buckets whose shards count as gathered since."""
    reduced: Mapping[int, Written]
    """Buckets whose gradients are to be published, and of which parameters there are some."""

    def apply(self, engine: Engine, over: Token) -> None:
        """Leave the engine as the program would; everything it started is over when the token ``over`` is."""
        now = engine._gathered
        engine._gathered = {
            index: replace(held, version=now[index].version if held.version is not None else None)
            for index, held in self.held.items()
        }
        engine.rebase(over)
        for index in self.gathered:
            engine.note_gathered(engine.buckets[index])
        for index in self.reduced:
            engine.buckets[index].hold_gradient()
        engine.gradients.publishing.due = dict(self.reduced)


class Watching:
    """Looks at an engine before and after a program."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._versions = [bucket.gathered_version for bucket in engine.buckets]
        self._had_gradient = [bucket.grad is not None for bucket in engine.buckets]

    def undo(self) -> None:
        """The program was not captured, and did not run: forget what it started and made."""
        engine = self._engine
        engine.gradients.forget()
        engine.offloads.forget()
        engine.rebase(engine.frame.streams.mark())
        engine.abort()
        for bucket, version, had in zip(engine.buckets, self._versions, self._had_gradient, strict=True):
            bucket.gathered_version = version
            if bucket.grad is not None and not had:
                bucket.drop_gradient()

    def transition(self, closed: Callable[[], bool]) -> Transition:
        """What has happened since. Gradients that were made meanwhile have their home there from now on."""
        buckets, publishing = self._engine.buckets, self._engine.gradients.publishing
        reduced, publishing.due = publishing.due, {}
        for bucket, had in zip(buckets, self._had_gradient, strict=True):
            if bucket.grad is not None and not had and bucket.home is None:
                bucket.home = Home(bucket.grad, closed)
                bucket.drop_gradient()
        gathered = tuple(
            i for i, (b, then) in enumerate(zip(buckets, self._versions, strict=True)) if b.gathered_version != then
        )
        for index in gathered:
            buckets[index].gathered_version = self._versions[index]  # it has not run yet
        return Transition(dict(self._engine._gathered), gathered, reduced)
