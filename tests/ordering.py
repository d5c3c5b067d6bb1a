"""What runs after what: programs on streams that note it, held against the dependencies of the schedule.

Each stream knows the set of events that are over when its next operation starts: what it ran itself, and what it was
told to wait for. These sets are compared with those that follow from ``Event.waits_for`` and the order on each stream,
which is how ``verify`` and ``simulate`` read a schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import fxshard
from fxshard.runtime.streams import Collective, Streams, Token
from fxshard.schedule.dependencies import MARKS, needed_before
from fxshard.schedule.events import OF_HOST, OF_MODEL, TENSOR, Event, Kind, Phase

Events = frozenset[tuple[int, int]]
"""Events by (step, position)."""


class KnowingToken:
    """A token, and the events that are over when it is."""

    def __init__(self, streams: KnowingStreams, inner: Token, over: Events) -> None:
        self._streams, self._inner, self._over = streams, inner, over

    def wait(self) -> None:
        self._inner.wait()
        self._streams.learn(self._over)

    def done(self) -> bool:
        return self._inner.done()


class KnowingStreams(Streams):
    """Streams that know what is over when their next operation starts."""

    def __init__(self) -> None:
        self.over: dict[str, Events] = dict.fromkeys(
            ("compute", "gather", "reduce", "replicas", TENSOR, "host"), frozenset()
        )
        self.current = "compute"
        self.event: tuple[int, int] | None = None
        """The event that is being carried out."""
        self.starts: dict[tuple[int, int], Events] = {}
        """What was over when each event started."""

    def learn(self, over: Events) -> None:
        self.over[self.current] |= over

    def started(self, event: tuple[int, int]) -> None:
        """An event starts on the current stream; what follows it there comes after it."""
        self.starts[event] = self.over[self.current]
        self.learn(frozenset([event]))

    def mark(self) -> Token:
        return KnowingToken(self, super().mark(), self.over["compute"])

    @contextlib.contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _start(self, stream: str, collective: Collective | None, then: Callable[[], None] | None) -> Token:
        if self.event is not None:
            self.started(self.event)
        return KnowingToken(self, super()._start(stream, collective, then), self.over[stream])


class Observed:
    """A model whose programs run on such streams. Wrap it before its first step."""

    def __init__(self, model: fxshard.ShardedModule, streams: KnowingStreams) -> None:
        self.model, self.streams = model, streams
        self._engine = model._sharding.engine
        self._events: tuple[Event, ...] = ()
        self._step = self._cursor = self._depth = 0
        gradients = self._engine.gradients
        for owner, name, kind in (
            (self._engine, "unshard", Kind.UNSHARD),
            (self._engine, "wait", Kind.WAIT),
            (self._engine, "reshard", Kind.RESHARD),
            (self._engine, "exchange", Kind.EXCHANGE),
            (self._engine, "carry", Kind.UPDATE),
            (gradients, "grad", Kind.GRAD),
            (gradients, "reduce", Kind.REDUCE),
            (gradients, "all_reduce", Kind.ALL_REDUCE),
            (gradients, "accumulate", Kind.ACCUMULATE),
            (gradients, "put_back", Kind.FINISH),
            (gradients, "finish", Kind.FINISH),
        ):
            setattr(owner, name, self._wrapped(getattr(owner, name), kind))
        for name in ("offload", "release", "reload", "restore"):
            setattr(self._engine.offloads, name, self._copying(getattr(self._engine.offloads, name), Kind(name)))
        self._engine._scales.refresh = self._scaling(self._engine._scales.refresh)  # type: ignore[method-assign]
        model.optimizer._run = self._landing(model.optimizer._run)
        self._engine.begin = self._around(self._engine.begin)  # type: ignore[method-assign]
        self._engine.end = self._ending(self._engine.end)  # type: ignore[method-assign]

    def step(self, run: Callable[[], None], schedule: fxshard.Schedule) -> list[str]:
        """Run a step; returns where what it waited for differs from what its schedule says."""
        self._step, self._cursor, self._events = self._step + 1, 0, schedule.events
        run()
        self._events = ()
        return self._differences(schedule)

    def _differences(self, schedule: fxshard.Schedule) -> list[str]:
        ran = {at for step, at in self.streams.starts if step == self._step}
        said = [needs & ran for needs in closures(schedule)]
        found = []
        for i, event in enumerate(schedule.events):
            where = f"event {i} ({event.phase} {event.kind} {event.bucket})"
            if i not in ran:
                if not self._may_be_left_out(schedule, event):
                    found.append(f"{where} did not run")
                continue
            over = {at for step, at in self.streams.starts[self._step, i] if step == self._step}
            if said[i] - over:
                found.append(f"{where} does not wait for {sorted(said[i] - over)}")
            if (
                event.kind in OF_HOST
            ):  # a copy comes after all that compute was given, marks included, which take no time
                over = {at for at in over if at in said[i] or schedule.events[at].kind not in MARKS}
            if over - said[i]:
                found.append(f"{where} waits for {sorted(over - said[i])}, which the schedule does not say")
        return found

    def _may_be_left_out(self, schedule: fxshard.Schedule, event: Event) -> bool:
        """A gather of what no step changed since the last one, as a frozen bucket that stays in memory; scales too.

        The model's own collectives run unseen: torch's operators start them. An exchange of tensor-parallel parts is
        left out by a data-parallel rank that has none.
        """
        unchanged = event.kind is Kind.UNSHARD and schedule.buckets[event.bucket_index].resident
        return unchanged or event.kind in (Kind.SCALES, *OF_MODEL) or event.stream == TENSOR

    def _wrapped(self, act: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        def carried_out(index: int, *args: Any, **kwargs: Any) -> Any:
            if self._depth or not self._events:  # a part of another event, or of a step that is not looked at
                return act(index, *args, **kwargs)
            self._depth += 1
            try:
                return self._carry_out(kind, index, lambda: act(index, *args, **kwargs), kwargs.get("stream"))
            finally:
                self._depth -= 1
                self.streams.event = None

        return carried_out

    def _copying(self, act: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        """Copies to the host and back are about no bucket: the next one of its kind is meant."""
        copied = self._wrapped(lambda _, *args: act(*args), kind)
        return lambda *args: copied(-1, *args)

    def _carry_out(self, kind: Kind, index: int, act: Callable[[], Any], stream: str | None = None) -> Any:
        phase = self._engine.frame.phase if kind not in (Kind.UPDATE, Kind.EXCHANGE) else Phase.OPTIMIZER
        place = self._place(kind, index, phase, stream or ("gather" if kind is Kind.EXCHANGE else None))
        if place is None:  # the optimizer step before gathered it, or a bucket without gradients is updated
            return act()
        self._compute_until(place)
        self._cursor = place + 1
        if kind is Kind.UPDATE:
            self.streams.started((self._step, place))
            gather = self._place(Kind.UNSHARD, index, Phase.OPTIMIZER)
            self.streams.event = (self._step, gather) if gather is not None else None
            return act()
        if kind in MARKS:
            self.streams.started((self._step, place))
            return act()
        if self._events[place].stream != "compute":
            self.streams.event = (self._step, place)
            return act()
        result = act()  # it waits inside, for what it must
        self.streams.started((self._step, place))
        return result

    def _place(self, kind: Kind, index: int, phase: Phase | None, stream: str | None = None) -> int | None:
        """Where the next such event of a bucket, or on a stream, stands in a phase."""
        for i in range(self._cursor, len(self._events)):
            event = self._events[i]
            of_bucket = kind is Kind.EXCHANGE or event.bucket_index == index
            if event.kind is kind and event.phase == phase and of_bucket and stream in (None, event.stream):
                return i
        return None

    def _compute_until(self, place: int) -> None:
        """The stretches of compute that stand before a place have been started."""
        for i in range(place):
            event = self._events[i]
            if event.kind is Kind.COMPUTE and (self._step, i) not in self.streams.starts:
                self.streams.started((self._step, i))

    def _scaling(self, refresh: Callable[..., None]) -> Callable[..., None]:
        """Scales are made by what a program begins with, on the stream that computes."""

        def refreshes(phase: Phase) -> None:
            scales = self._engine._scales
            before = scales._versions
            refresh(phase)
            place = self._place(Kind.SCALES, -1, phase)
            if scales._versions is not before and place is not None:
                self._cursor = place + 1
                self.streams.started((self._step, place))

        return refreshes

    def _landing(self, run: Callable[[Any], None]) -> Callable[[Any], None]:
        """What comes back from tensor-parallel ranks is applied before the optimizer's next instruction waits for
        anything."""

        def runs(instruction: Any) -> None:
            run(instruction)
            if self._cursor and self._cursor < len(self._events) and self._events[self._cursor - 1].stream == TENSOR:
                self._compute_until(self._cursor + 1)

        return runs

    def _around(self, begin: Callable[..., None]) -> Callable[..., None]:
        def begins(*args: Any, **kwargs: Any) -> None:
            self._depth += 1
            begin(*args, **kwargs)
            self._depth -= 1

        return begins

    def _ending(self, end: Callable[[], None]) -> Callable[[], None]:
        def ends() -> None:
            phase = self._engine.frame.phase
            last = [i for i, event in enumerate(self._events) if event.phase == phase]
            self._compute_until(last[-1] + 1 if last else 0)
            end()

        return ends


def closures(schedule: fxshard.Schedule) -> list[frozenset[int]]:
    """The events that are over when each starts, by ``waits_for`` and the order on each stream."""
    last: dict[str, int] = {}
    said: list[frozenset[int]] = []
    for i, (event, waits) in enumerate(zip(schedule.events, needed_before(schedule.events), strict=True)):
        needs = {*waits, *([last[event.stream]] if event.stream in last else [])}
        said.append(frozenset(needs).union(*(said[need] for need in needs)))
        last[event.stream] = i
    return said


def observed(make: Callable[[], fxshard.ShardedModule]) -> Observed:
    """A model whose collectives are started on streams that know what is over."""
    streams = KnowingStreams()
    with mock.patch("fxshard.runtime.frame.streams_for", lambda device: streams):
        return Observed(make(), streams)
