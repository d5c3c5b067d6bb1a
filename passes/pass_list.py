"""The passes in order, as a value that a user can change: add one, drop one, put another in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

from torch import fx

from fxshard._torch.errors import ConfigError
from fxshard.passes.context import PassContext
from fxshard.passes.contract import check_contracts

Pass = Callable[[fx.GraphModule, PassContext], fx.GraphModule]

AFTER_ALL = ("order_prefetch", "keep_resident", "plan_memory", "fill_arena")
"""What works on a whole step, after the lists. The options ``prefetch``, ``keep_resident`` and ``arena`` govern it."""


@dataclass(frozen=True)
class Place:
    """A place in the list, and what runs there."""

    name: str
    run: Pass
    own: bool = False
    """Whether the pass is the user's."""

    @property
    def title(self) -> str:
        """The name, and that of the pass where another one was put there."""
        mine = name_of(self.run)
        return self.name if mine == self.name else f"{mine} (in place of {self.name})"


def name_of(run: object) -> str:
    """What a pass is called: the name of the function, also inside ``functools.partial``, or of the object's class."""
    if isinstance(run, partial):
        return name_of(run.func)
    return getattr(run, "__name__", type(run).__name__)


def places(*passes: Pass) -> tuple[Place, ...]:
    """fxshard's own passes."""
    return tuple(Place(name_of(run), run) for run in passes)


@dataclass(frozen=True)
class PassList:
    """Which passes work on which graph, in order. ``fxshard.PASSES`` is the list that is used unless told otherwise.

    Nothing is changed in place: each method gives another list. A pass that stands in several lists (``insert_reshard``
    works on forward, backward and evaluation) is met in all of them; ``context.phase`` says which graph it is.

    >>> fxshard.compile(model, passes=fxshard.PASSES.before("insert_unshard", count_products))
    """

    captured: tuple[Place, ...]
    """On Dynamo's graph, before autograd."""
    joint: tuple[Place, ...]
    """On forward and backward in one graph, before it is partitioned."""
    forward: tuple[Place, ...]
    backward: tuple[Place, ...]
    eval: tuple[Place, ...]

    def __post_init__(self) -> None:
        for where, listed in self.lists():
            names = [place.name for place in listed]
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ConfigError(
                    f"two passes on the {where} graph are called {min(twice)!r}: passes are found by their name, "
                    "give the function another one"
                )
        check_contracts({where: [place.name for place in listed] for where, listed in self.lists()})

    def before(self, name: str, run: Pass) -> PassList:
        """With a pass before the one called ``name``."""
        return self._edit(name, lambda place: (_own(run), place))

    def after(self, name: str, run: Pass) -> PassList:
        """With a pass after the one called ``name``."""
        return self._edit(name, lambda place: (place, _own(run)))

    def replace(self, name: str, run: Pass) -> PassList:
        """With a pass in the place of the one called ``name``, under whose name it is found from then on."""
        return self._edit(name, lambda place: (replace(_own(run), name=place.name),))

    def without(self, name: str) -> PassList:
        """Without the pass called ``name``. What others need cannot be dropped."""
        return self._edit(name, lambda place: ())

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the methods take."""
        return tuple(dict.fromkeys(place.name for _, listed in self.lists() for place in listed))

    @property
    def own(self) -> tuple[str, ...]:
        """The passes that are not fxshard's."""
        return tuple(dict.fromkeys(place.title for _, listed in self.lists() for place in listed if place.own))

    def lists(self) -> list[tuple[str, tuple[Place, ...]]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def __str__(self) -> str:
        lines = [
            f"{name:<10}" + " → ".join(place.title + ("*" if place.own else "") for place in listed)
            for name, listed in self.lists()
        ]
        return "\n".join([*lines, f"{'then':<10}" + " → ".join(AFTER_ALL)])

    def _edit(self, name: str, edit: Callable[[Place], tuple[Place, ...]]) -> PassList:
        if name in AFTER_ALL:
            raise ConfigError(
                f"{name!r} works on a whole step and has a fixed place at the end: add a pass before it with "
                '.after("insert_reshard", …), or see the options prefetch, keep_resident and arena'
            )
        if name not in self.names:
            raise ConfigError(f"there is no pass {name!r}; the passes are {', '.join(self.names)}")
        edited = {
            where: tuple(new for place in listed for new in (edit(place) if place.name == name else (place,)))
            for where, listed in self.lists()
        }
        return PassList(**edited)


def _own(run: Pass) -> Place:
    if not callable(run):
        raise ConfigError(f"{run!r} is no pass: expected a function of (module, context) that returns the module")
    return Place(name_of(run), run, own=True)
