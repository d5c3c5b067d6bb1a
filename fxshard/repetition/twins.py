"""A model's twin, in which layers that are like others are not traced.

Dynamo traces every layer of a model, line by line. What a layer's forward does depends on its class, on what is in the
module, and on what it is called with. Of layers that agree in the first two, one goes into the twin as it is. The
others leave one node each (:mod:`fxshard.repetition.stand_ins`), which is written out again when the graph is there, if
calls agree as well (:mod:`fxshard.repetition.refill`). The code between layers, the number of layers and their order
are traced as ever: a twin has as many layers, of the same classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxshard import _compat
from fxshard.repetition.alike import Seen, alike, is_all_in_its_attributes, is_plain, knows_modules
from fxshard.repetition.expansion import KEPT
from fxshard.repetition.stand_ins import Path, marked, stand_in

_TOKENS = itertools.count()


@dataclass(frozen=True)
class Follower:
    """A layer that is not traced, and the one that it is like."""

    layer: nn.Module
    leader: Path


class Twins:
    """A model's twin, for as long as the layers that are not traced are like those that are."""

    def __init__(self, model: nn.Module) -> None:
        self.token = next(_TOKENS)
        """Tells this twin's nodes from those of others."""
        self.leaders: dict[Path, nn.Module] = {}
        """Layers that others follow."""
        self.followers: dict[Path, Follower] = {}
        self._twins: list[tuple[nn.Module, nn.Module, frozenset[str]]] = []
        """Twin, module, and which attributes are the twin's own."""
        self._choose(model)
        self.original = model
        self.model = self._twin(model, ())
        self._look()

    def keep_up(self) -> bool:
        """Take over what has changed in the model. False if its layers are others, or not alike any more."""
        if _compat.any_global_hook():  # between a traced layer's forward and the mark behind it
            return False
        if self._seen.lasts():
            return True
        if any(list(module._modules.values()) != had for module, had in self._children.items()):
            return False
        if any(type(twin) is not type(module) for twin, module, _ in self._twins):
            return False
        if any(map(knows_modules, self.original.modules())):
            return False
        if not all(alike(self.leaders[each.leader], each.layer) for each in self.followers.values()):
            return False
        for twin, module, own in self._twins:
            kept = {name: value for name, value in vars(twin).items() if name in own}
            vars(twin).clear()
            vars(twin).update(vars(module) | kept)
        self._look()
        return True

    def _look(self) -> None:
        layers = [*self.leaders.values(), *(each.layer for each in self.followers.values())]
        modules = [*(module for _, module, _ in self._twins), *(each for layer in layers for each in layer.modules())]
        self._seen = Seen(dict.fromkeys(modules))
        self._children = {module: list(module._modules.values()) for _, module, _ in self._twins}

    def _choose(self, model: nn.Module) -> None:
        """Of each list of many layers the first of each kind is traced.

        Where something is frozen, the first layer may get what wants no gradient, and the others what does. It is
        traced then, and not followed. A module that knows others might find that they are not their twins.
        """
        if any(map(knows_modules, model.modules())):
            return
        first = 0 if all(parameter.requires_grad for parameter in model.parameters()) else 1
        for path, layers in _lists(model, ()):
            kinds: dict[Path, nn.Module] = {}
            for name, layer in list(layers._modules.items())[first:]:
                if layer is None or not is_plain(layer) or _has_hooks(layer):
                    continue
                leader = next((each for each, kind in kinds.items() if alike(kind, layer)), None)
                if leader is None:
                    kinds[*path, name] = layer
                else:
                    self.followers[*path, name] = Follower(layer, leader)
                    self.leaders[leader] = kinds[leader]

    def _twin(self, module: nn.Module, path: Path) -> nn.Module:
        """A module with twins of its submodules; itself where none of them is another."""
        if path in self.followers:
            return self._with(module, stand_in(self.token, path, self.followers[path].leader))
        if path in self.leaders:
            return self._with(module, marked(self.token, path))
        if not any(follower[: len(path)] == path for follower in self.followers):
            return module
        children = {
            name: self._twin(child, (*path, name)) if child is not None else None
            for name, child in module._modules.items()
        }
        return self._with(module, {"_modules": children})

    def _with(self, module: nn.Module, own: dict[str, Any]) -> nn.Module:
        twin: nn.Module = object.__new__(type(module))
        vars(twin).update(vars(module) | own)
        self._twins.append((twin, module, frozenset(own)))
        return twin


def _lists(module: nn.Module, path: Path) -> Iterator[tuple[Path, nn.Module]]:
    """The lists of many layers in a model, but for those in such layers and in what can have no twin."""
    if not is_all_in_its_attributes(module):
        return
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= KEPT + 2:
        yield path, module
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from _lists(child, (*path, name))


def _has_hooks(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks)
