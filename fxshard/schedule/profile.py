"""Recorded durations: what a step took here, in place of what the cost model estimates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING

from fxshard._torch.errors import ConfigError
from fxshard.schedule.events import Event, Kind, Phase

if TYPE_CHECKING:
    from fxshard.schedule.schedule import Schedule

FORMAT = 1

Key = tuple[str, str, int]
"""("compute", phase, events before it that are no gathers), ("gather", bucket, 0) or ("reduce", bucket, 0).

Gathers do not count because they are what a profile moves: a stretch of compute keeps its key.
"""


@dataclass(frozen=True)
class Profile:
    """Seconds of each stretch of compute and of each collective, equal on all ranks.

    >>> with model.profile(steps=3) as profile:
    ...     for x, y in batches:
    ...         train(model, x, y)
    >>> model.reschedule(profile)
    """

    seconds: dict[Key, float] = field(default_factory=dict)
    structure: dict[str, str] = field(default_factory=dict)
    """By phase: a digest of the events that were recorded, gathers aside."""

    def compute(self, phase: Phase, number: int) -> float | None:
        return self.seconds.get(("compute", str(phase), number))

    def gather(self, bucket: str) -> float | None:
        return self.seconds.get(("gather", bucket, 0))

    def reduce(self, bucket: str) -> float | None:
        return self.seconds.get(("reduce", bucket, 0))

    def fits(self, phase: Phase, events: Iterable[Event]) -> bool:
        """Whether it has this phase; raises :class:`ConfigError` if it has it for another model or another plan."""
        recorded = self.structure.get(str(phase))
        if recorded is not None and recorded != structure(events):
            raise ConfigError(
                f"the profile was recorded on another schedule: the {phase} phase has other events. Record it with the "
                "model, ZeRO stage, units and memory budget it is used for"
            )
        return recorded is not None

    def of(self, schedule: Schedule) -> dict[int, float]:
        """{position of an event: seconds}, for ``Schedule.simulate``; what was not recorded is left out."""
        found: dict[int, float] = {}
        for phase in dict.fromkeys(event.phase for event in schedule.events):
            own = [(i, event) for i, event in enumerate(schedule.events) if event.phase is phase]
            if not self.fits(phase, (event for _, event in own)):
                continue
            number = 0
            for i, event in own:
                key = key_of(event, phase, number)
                if key in self.seconds:
                    found[i] = self.seconds[key]
                number += event.kind not in (Kind.COMPUTE, Kind.UNSHARD, Kind.SCALES)
        return found

    def to_json(self) -> str:
        lines = [[*key, seconds] for key, seconds in sorted(self.seconds.items())]
        return json.dumps({"fxshard_profile": FORMAT, "structure": self.structure, "seconds": lines}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read back what :meth:`to_json` wrote; raises :class:`ConfigError` where that is not possible."""
        try:
            data = json.loads(text)
            if data["fxshard_profile"] != FORMAT:
                raise ConfigError(f"a profile of format {data['fxshard_profile']!r}; this fxshard reads {FORMAT}")
            seconds = {(str(kind), str(name), int(n)): float(value) for kind, name, n, value in data["seconds"]}
            return cls(seconds, {str(phase): str(digest) for phase, digest in data["structure"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a profile that fxshard wrote: {error!r}") from None

    @classmethod
    def from_samples(cls, ranks: Iterable[Mapping[Key, list[float]]], structure: dict[str, str]) -> Profile:
        """The median over steps, then the mean over ranks."""
        gathered: dict[Key, list[float]] = {}
        for samples in ranks:
            for key, values in samples.items():
                gathered.setdefault(key, []).append(median(values))
        return cls({key: fmean(values) for key, values in sorted(gathered.items())}, structure)


def key_of(event: Event | None, phase: Phase, passed: int) -> Key | None:
    """Under what a profile has an event, if it has it; None is a stretch of compute. ``passed``: events of its phase
    before it that are no gathers."""
    if event is None or event.kind is Kind.COMPUTE:
        return "compute", str(phase), passed
    collective = {Kind.UNSHARD: "gather", Kind.REDUCE: "reduce"}.get(event.kind)
    return None if collective is None else (collective, event.bucket, 0)


def structure(events: Iterable[Event]) -> str:
    """A digest of the events of a phase that a profile does not move."""
    aside = (Kind.COMPUTE, Kind.UNSHARD, Kind.UPDATE, Kind.SCALES)
    lines = [f"{e.kind} {e.bucket} {e.bytes}" for e in events if e.kind not in aside]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def as_durations(schedule: Schedule, durations: Mapping[int, float] | Profile | None) -> Mapping[int, float]:
    """Seconds by position from either."""
    return durations.of(schedule) if isinstance(durations, Profile) else durations or {}
