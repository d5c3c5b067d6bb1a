"""Layers that are known to compute what their neighbours do, and so need not be captured by Dynamo.

``fold_layers`` finds out from a captured graph that layers repeat, and spares them AOTAutograd; Dynamo traces all
before. Where it is known of a model that it calls the modules of a list one after the other, and that those in the
middle are alike, a few of them are captured, and what is written again for each layer is written for the absent ones
too. That is never concluded from a model: its author says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from fxshard._torch.errors import FxshardError
from fxshard.passes.fold_layers import Folded
from fxshard.passes.repeats import Member
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.schedule.params import ParamRef

FIRST, LAST = 5, 4
"""Layers that are captured, at the beginning and at the end: two more than ``fold_layers`` needs, because what repeats
may begin in the middle of a module."""

Refs = Sequence[ParamRef | None]
Input = tuple[Member | None, ParamRef | None]


class LayersDifferError(FxshardError):
    """Layers that were said to be alike are not: all of them have to be captured."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the modules of {path} do not repeat in the captured graph: capture all of them")


@dataclass(frozen=True)
class AbsentLayers:
    """The modules of the list at ``path`` that are not captured."""

    path: str
    numbers: range

    @classmethod
    def of(cls, path: str, layers: int) -> AbsentLayers | None:
        """Of a list with so many modules; None if all are captured."""
        absent = cls(path, range(FIRST, layers - LAST))
        return absent if absent.numbers else None

    def remove(self, model: nn.Module) -> None:
        """Those that are left keep their names."""
        modules = model.get_submodule(self.path)
        for number in self.numbers:
            delattr(modules, str(number))

    def put_back(self, folded: Folded, refs: Refs, plan: ShardingPlan) -> tuple[Folded, Refs]:
        """As if all layers had been captured; an error if layers have other parameters than their names and kinds say.

        ``refs``: which parameter of the whole model each input of the captured graph is.
        """
        names, more = _Names(self.path, plan.buckets), len(self.numbers)
        inputs = list(zip(folded.members, refs, strict=True))
        dropped = [i for i in range(len(inputs)) if i not in set(folded.kept)]
        if not dropped or dropped != list(range(dropped[0], dropped[-1] + 1)):
            raise LayersDifferError(self.path)
        template = [(member[1], ref) for member, ref in (inputs[i] for i in dropped) if member and member[0] == 2]
        begun = {role: names.number(ref) - 2 for role, ref in template}
        again: list[Input] = [
            ((layer, role), names.moved(ref, layer + begun[role]))
            for layer in range(2, folded.removed + 2 + more)
            for role, ref in template
        ]
        late: list[Input] = [
            (member and (member[0] + more, member[1]), ref) for member, ref in inputs[dropped[-1] + 1 :]
        ]
        whole = [*inputs[: dropped[0]], *again, *late]
        kinds = {role: plan.kind(ref) for role, ref in template if ref is not None}
        for member, ref in whole:
            if member is None or member[0] == 0:  # a first layer may differ
                continue
            layer, role = member
            if ref is None or names.number(ref) - layer != begun.get(role) or plan.kind(ref) != kinds[role]:
                raise LayersDifferError(self.path)
        kept = (*range(dropped[0]), *range(dropped[0] + len(again), len(whole)))
        members = tuple(member for member, _ in whole)
        return replace(folded, kept=kept, members=members, removed=folded.removed + more), [ref for _, ref in whole]


class _Names:
    """Names of parameters, by layer."""

    def __init__(self, path: str, buckets: Sequence[BucketPlan]) -> None:
        self._pattern = re.compile(rf"({re.escape(path)}\.)(\d+)(\..*)")
        self._buckets = buckets
        self._places = {name: ParamRef(b.index, i) for b in buckets for i, name in enumerate(b.params)}

    def number(self, ref: ParamRef | None) -> int:
        """Of the layer that a parameter belongs to; one that no layer has for other inputs."""
        found = self._match(ref)
        return -1 if found is None else int(found[2])

    def moved(self, ref: ParamRef | None, number: int) -> ParamRef | None:
        """The same parameter of another layer."""
        found = self._match(ref)
        return None if found is None else self._places.get(f"{found[1]}{number}{found[3]}")

    def _match(self, ref: ParamRef | None) -> re.Match[str] | None:
        return None if ref is None else self._pattern.fullmatch(self._buckets[ref.bucket].params[ref.position])
