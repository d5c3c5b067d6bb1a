"""Recording how long the events of a model's steps take: ``model.profile()``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fxshard._torch.errors import ConfigError, StateError
from fxshard.runtime.recorder import Recorder
from fxshard.schedule.events import Phase
from fxshard.schedule.profile import Profile, structure

if TYPE_CHECKING:
    from fxshard.frontend.module import ShardedModule


@contextlib.contextmanager
def profiled(model: ShardedModule, steps: int) -> Iterator[Profile]:
    """See ``ShardedModule.profile``."""
    engine = model._sharding.engine
    if engine.recorder is not None:
        raise StateError("this model is being profiled already")
    if steps < 1:
        raise ConfigError(f"profile(steps={steps}): expected at least one step")
    profile, options = Profile(), engine.frame.options
    recorder = engine.recorder = Recorder(engine.device, steps)
    engine.frame.options = replace(options, debug=replace(options.debug, overlap=False))
    try:
        yield profile
    finally:
        engine.recorder, engine.frame.options = None, options
    recorder.close()
    events = model.schedule.events
    phases = {phase: [event for event in events if event.phase is phase] for phase in (Phase.FORWARD, Phase.BACKWARD)}
    shared = model._sharding.agreement.share(recorder.samples)
    filled = Profile.from_samples(shared, {str(phase): structure(own) for phase, own in phases.items() if own})
    profile.seconds.update(filled.seconds)
    profile.structure.update(filled.structure)
