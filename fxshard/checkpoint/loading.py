"""``fxshard.load``: find, check, agree, and only then read, each rank its rows."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, TensorStorageMetadata

from fxshard._torch.errors import CheckpointError, FxshardError
from fxshard._torch.progress import long_work
from fxshard.checkpoint import folder, groups
from fxshard.checkpoint.extra_state import restore_extra_states, restore_random_states
from fxshard.checkpoint.fit import Stored, fields_in, match_model, targets
from fxshard.checkpoint.held import (
    MODEL,
    OPTIMIZER,
    Parts,
    empty_like_parameter,
    of_model,
    of_optimizer,
    parameter_names,
)
from fxshard.checkpoint.planners import LoadRows, Progress, Target
from fxshard.checkpoint.ranks import Ranks
from fxshard.checkpoint.reader import RowReader
from fxshard.checkpoint.saving import check_model, explained, quiet, wait_for_save
from fxshard.frontend.module import ShardedModule
from fxshard.optim.moments import Unpacked
from fxshard.optim.sharded import ShardedOptimizer
from fxshard.planner.stored_names import Source

MODULES = "modules.0"
"""Where the extra state of modules is: the first rank's, as buffers are."""


@dataclass(frozen=True)
class Loaded:
    """The result of ``fxshard.load``."""

    path: Path
    extra: Any
    """The ``extra`` that this rank gave to ``fxshard.save``, or rank 0 where the number of ranks has changed."""
    manifest: dict[str, Any]
    """The manifest of the checkpoint: ranks, versions, hyperparameters, digest of the schedule."""
    notes: list[str] = dataclass_field(default_factory=list)
    """Differences: experts in another layout, frozen parameters that were not saved, random states that were
    not restored."""


def load(
    model: ShardedModule,
    path: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    weights_only: bool = False,
    progress: Progress | None = None,
) -> Loaded:
    """Load what ``fxshard.save`` wrote, on any number of ranks, ZeRO stage and layout. Collective.

    ``path``: a checkpoint, or a folder of checkpoints: the latest complete one is taken. Everything is checked first,
    checksums included: a damaged checkpoint, other keys, shapes, dtypes, groups or Newton–Schulz coefficients are a
    ``CheckpointError`` on every rank, and nothing is changed. Reading runs no code of the folder's. Hyperparameters
    continue as saved. ``weights_only`` changes parameters and buffers and nothing else. What was saved with
    ``frozen=False`` has no parameters that do not train: those of the model stay as they are.

    >>> loaded = fxshard.load(model, "runs/a")
    >>> scheduler.load_state_dict(loaded.extra["scheduler"])
    """
    ranks = check_model(model)
    wait_for_save(model)
    ranks.doing = f"loading {path}"
    path = _find(Path(path), ranks)
    optimizer = model._optimizer if optimizer is None else optimizer
    try:
        plan = _Plan(model, None if weights_only else optimizer, path, ranks.parts)
        problems = plan.problems(weights_only)
    except (FxshardError, OSError) as error:
        problems = [str(error)]
    ranks.settle(problems, f"{path} does not fit, nothing was loaded")
    # A bit that flipped is found before the first byte of the model is overwritten.
    parts = (f"{MODEL}.", "extra.", "modules.") if weights_only else ("",)
    ranks.settle(plan.reader.damage(parts, ranks.rank, ranks.size), f"{path} is damaged, nothing was loaded")
    same_ranks = plan.manifest["ranks"] == ranks.size
    objects = [f"extra.{ranks.rank if same_ranks else 0}", *plan.of_modules]
    objects += [f"rng.{ranks.rank}"] if same_ranks and not weights_only else []
    shown = contextlib.nullcontext(progress) if progress is not None else long_work(f"loading {path.name}")
    if isinstance(plan.optimizer, ShardedOptimizer):
        plan.optimizer.settle(may_raise=False)  # what is still on its way to the host would land on what is read
    with torch.no_grad(), shown as watch:
        planner = LoadRows(plan.targets, objects, watch)
        read_rows(plan.reader, planner, ranks, path)
    plan.finish()
    if left := restore_extra_states(model._inner, planner.loaded.get(MODULES, {})):
        plan.notes.append(
            f"no extra state was saved for these modules: {', '.join(name or 'the model' for name in left)}"
        )
    if f"rng.{ranks.rank}" in planner.loaded:
        restore_random_states(planner.loaded[f"rng.{ranks.rank}"], model._sharding.engine.device)
    elif not weights_only:
        plan.notes.append(f"random states were not restored: saved on {plan.manifest['ranks']} ranks, not {ranks.size}")
    extra = next((value for key, value in planner.loaded.items() if key.startswith("extra.")), None)
    return Loaded(path, extra, plan.manifest, plan.notes)


class _Plan:
    """The reads of this rank, and the problems that were found."""

    def __init__(self, model: ShardedModule, optimizer: torch.optim.Optimizer | None, path: Path, parts: Parts) -> None:
        self.model, self.optimizer, self.parts = model, optimizer, parts
        self.manifest = folder.read(path)
        self.reader = RowReader(path, self.manifest["files"])
        metadata = self.reader.read_metadata().state_dict_metadata
        self.of_modules = [MODULES] if MODULES in metadata else []  # older checkpoints have none
        self.stored = {
            key: Stored(tuple(value.size), value.properties.dtype)
            for key, value in metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self.state: dict[torch.Tensor, Any] = {}
        self.targets: list[Target] = []
        self.notes: list[str] = []

    def problems(self, weights_only: bool) -> list[str]:
        """Everything that does not fit. Plans the reading on the way."""
        frozen = self.manifest.get("frozen", True)
        held = list(of_model(self.model, self.parts, frozen=frozen, loading=True))
        if not frozen:
            self.notes.append("parameters that do not train are not in it, and stayed as they are")
        match = match_model(held, self.stored)
        found = [*match.problems, *(f"{name} is not in the model" for name in match.unused)]
        self.targets += targets(held, match.of, self.stored, found)
        if match.regrouped:
            self.notes.append(f"experts stored in another layout: {', '.join(match.regrouped)}")
        if not weights_only:
            found += self._optimizer_problems(match.of)
        return found

    def _optimizer_problems(self, sources: dict[str, Source]) -> list[str]:
        saved = self.manifest["optimizer"]
        if saved is None or self.optimizer is None:
            if saved is None and self.optimizer is None:
                return []
            has, lacks = ("checkpoint", "model") if saved is not None else ("model", "checkpoint")
            return [f"the {has} has an optimizer and the {lacks} has none: pass optimizer=, or weights_only=True"]
        found = groups.misfits(self.model, self.optimizer, saved, sources)
        if not found:
            self.state = {
                parameter: state if isinstance(state, Unpacked) else dict(state)
                for parameter, state in self.optimizer.state.items()
            }
            if isinstance(self.optimizer, ShardedOptimizer):
                found += self._left_over(sources)
            else:
                self._add_missing_state(sources)
            self.targets += targets(list(of_optimizer(self.model, self.state, self.parts)), sources, self.stored, found)
        return found

    def _left_over(self, sources: dict[str, Source]) -> list[str]:
        """State that this optimizer would not continue with: the second momentum of NorMuon, in Muon."""
        fields, names = fields_in(self.stored), parameter_names(self.model)
        places = (
            (stored, set(state))
            for p, state in self.state.items()
            for stored in groups.stored_as(names[id(p)], sources)
        )
        return [
            f"{OPTIMIZER}.{stored}.{field} is not in this optimizer: it was saved by another"
            for stored, own in places
            for field in sorted(set(fields.get(stored, ())) - own)
        ]

    def _add_missing_state(self, sources: dict[str, Source]) -> None:
        """A ``torch.optim`` optimizer has no state before its first step: give it what the checkpoint has."""
        assert self.optimizer is not None
        fields, names = fields_in(self.stored), parameter_names(self.model)
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            name = names[id(parameter)]
            source = sources[name].names[0] if name in sources else name
            state = self.state.setdefault(parameter, {})
            for field in set(fields.get(source, ())) - state.keys():
                stored = self.stored[f"{OPTIMIZER}.{source}.{field}"]
                assert stored.dtype is not None
                if field == "step" or (parameter.ndim and not stored.shape):  # not sharded, whatever the parameter is
                    state[field] = torch.zeros((), dtype=stored.dtype)
                else:
                    state[field] = empty_like_parameter(self.model, name, stored.dtype)

    def finish(self) -> None:
        """Invalidate everything that is derived from what was read."""
        self.model.parameters_changed()
        for bucket in self.model._sharding.buckets:
            bucket.loaded()
        if self.optimizer is not None:
            for parameter, state in self.state.items():
                if not isinstance(state, Unpacked):
                    self.optimizer.state[parameter].update(state)
            groups.restore(self.optimizer, self.manifest["optimizer"]["groups"])
            if isinstance(self.optimizer, ShardedOptimizer):
                self.optimizer.state_was_written()


def _find(path: Path, ranks: Ranks) -> Path:
    """The first rank looks for the checkpoint and at its files; all take what it found."""
    found, problem = None, ""
    if ranks.rank == 0:
        try:
            found = folder.find(path)
        except CheckpointError as error:
            problem = str(error)
    found, problem = ranks.from_first((found, problem))
    if found is None:
        raise CheckpointError(f"{problem}; nothing was loaded")
    return found


def read_rows(reader: RowReader, planner: LoadRows, ranks: Ranks, path: Path) -> None:
    """Each rank what is planned, together."""
    try:
        with quiet(ranks), ranks.together():
            dcp.load({}, storage_reader=reader, planner=planner, process_group=ranks.group, no_dist=ranks.group is None)
    except CheckpointException as error:
        raise CheckpointError(
            f"{path} could not be read to the end, load another checkpoint before training on: {explained(error)}"
        ) from error
