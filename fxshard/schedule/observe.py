"""Watching a compilation: what each pass did, in the log; every graph before and after it, in a folder.

``FXSHARD_LOG=info`` turns on the first, ``FXSHARD_DUMP=folder`` the second. Neither: there is no observer.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxshard._torch.errors import ConfigError
from fxshard._torch.log import LOG, rank
from fxshard.schedule.events import event_of, events

if TYPE_CHECKING:
    from fxshard.schedule.schedule import Schedule

VARIABLE = "FXSHARD_DUMP"

_captures = itertools.count(1)


def observed() -> bool:
    """Whether what happens to captured graphs is to be recorded."""
    return bool(os.environ.get(VARIABLE)) or LOG.isEnabledFor(logging.INFO)


def observer() -> Observer | None:
    """The observer of the next captured graph, if one was asked for."""
    asked = os.environ.get(VARIABLE)
    if not observed():
        return None
    number = next(_captures)
    if not asked:
        return Observer(number)
    folder = Path(asked, f"rank-{rank()}", f"capture-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{VARIABLE}={asked}: cannot make {folder}: {error.strerror}") from None
    return Observer(number, folder)


@dataclass
class Observer:
    """Follows one captured graph. ``folder`` gets the graphs; None: they are not written."""

    number: int
    folder: Path | None = None
    _written: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def say(self, message: str, *values: object) -> None:
        LOG.info(f"capture {self.number}: {message}", *values)

    def begin(self, where: str, name: str, module: fx.GraphModule) -> Watch:
        """A pass is about to work on a graph."""
        stem = f"{next(self._written):02}-{where}-{re.sub(r'[^a-z0-9_]+', '-', name.lower()).strip('-')}"
        self.write(f"{stem}.before.txt", module)
        return Watch(self, where, name, stem, Snapshot.of(module), time.perf_counter())

    def schedule(self, schedule: Schedule, name: str) -> None:
        """A schedule is emitted, and not verified yet: a wrong one is worth looking at."""
        self.say("%s schedule: %d events, arena %d bytes", name, len(schedule.events), schedule.arena_bytes)
        if self.folder is not None:
            from fxshard.schedule.files import to_json
            from fxshard.schedule.table import render

            (self.folder / f"{name}.schedule.json").write_text(to_json(schedule), encoding="utf-8")
            (self.folder / f"{name}.schedule.txt").write_text(render(schedule), encoding="utf-8")

    def write(self, name: str, module: fx.GraphModule) -> None:
        if self.folder is not None:
            (self.folder / name).write_text("\n".join([*graph_lines(module), ""]), encoding="utf-8")


@dataclass(frozen=True)
class Snapshot:
    """The parts of a graph that the log compares: its nodes in order, their text, and runtime nodes by kind."""

    nodes: tuple[str, ...]
    lines: tuple[str, ...]
    kinds: Counter[str]

    @classmethod
    def of(cls, module: fx.GraphModule) -> Snapshot:
        kinds = Counter(str(event.kind) for _, event in events(module.graph))
        return cls(tuple(node.name for node in module.graph.nodes), tuple(graph_lines(module)), kinds)

    def became(self, after: Snapshot) -> str:
        """``30 → 38 nodes, +4 unshard, +4 wait``"""
        if self.nodes == after.nodes:
            noted = sum(one != other for one, other in zip(self.lines, after.lines, strict=True))
            return f"{len(self.nodes)} nodes as before" + (f", something noted on {noted}" if noted else "")
        if len(self.nodes) == len(after.nodes) and self.kinds == after.kinds:
            moved = set(self.nodes) == set(after.nodes)
            return f"{len(self.nodes)} nodes, {'in another order' if moved else 'some replaced'}"
        changed = [kind for kind in self.kinds | after.kinds if after.kinds[kind] != self.kinds[kind]]
        parts = [f"{after.kinds[kind] - self.kinds[kind]:+} {kind}" for kind in changed]
        return ", ".join([f"{len(self.nodes)} → {len(after.nodes)} nodes", *parts])


@dataclass(frozen=True)
class Watch:
    """A pass at work."""

    observer: Observer
    where: str
    name: str
    stem: str
    before: Snapshot
    started: float

    def done(self, module: fx.GraphModule, seconds: float | None = None) -> None:
        """``seconds``: what it took, where that is not the time since it began."""
        taken = time.perf_counter() - self.started if seconds is None else seconds
        became = self.before.became(Snapshot.of(module))
        self.observer.say("%s: %s: %.1f ms, %s", self.where, self.name, taken * 1e3, became)
        self.observer.write(f"{self.stem}.after.txt", module)


def graph_lines(module: fx.GraphModule) -> list[str]:
    """One for each node: name, call, arguments; then what it gives and whether backward computes it again.

    For a runtime node: why it is there, and where its buffer lies.
    """
    return [_line(node) for node in module.graph.nodes]


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    remark = _remark(node)
    comment = f"    # {remark}" if remark else ""
    if node.op == "placeholder":
        return f"{node.name}: input{comment}"
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    arguments = [repr(arg) for arg in node.args] + [f"{key}={value!r}" for key, value in node.kwargs.items()]
    return f"{node.name} = {target.removesuffix('.default')}({', '.join(arguments)}){comment}"


def _remark(node: fx.Node) -> str:
    event = event_of(node)
    if event is not None:
        place = f", at byte {event.slot.offset} of the arena" if event.slot is not None else ""
        return f"{event.kind} {event.bucket}: {event.why}{place}"
    mark = node.meta.get("recompute")
    described = _described(node.meta.get("val", node.meta.get("example_value")))
    return ", ".join(filter(None, (described, getattr(mark, "name", ""))))


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return ", ".join(filter(None, map(_described, value)))
    return ""
