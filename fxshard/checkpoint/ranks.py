"""The ranks of a model when they save and load: a group of their own, in which an error of one is an error of all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fxshard._torch import private
from fxshard._torch.errors import CheckpointError, PeerError
from fxshard.checkpoint.roll_call import RollCall
from fxshard.frontend.sharding import Sharding


class Ranks:
    """A gloo group of its own: a save that runs during training must not mix its messages with those of training."""

    def __init__(self, sharding: Sharding) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        self.doing = "saving or loading a checkpoint"
        """What a rank that waits in vain says that it was doing."""
        members = sharding.agreement.members
        if len(members) > 1:
            self.rank, self.size = members.index(dist.get_rank()), len(members)
            self._roll_call = RollCall(members, private.group_timeout())
            with self.together():
                timeout = self._roll_call.collectives
                self.group = dist.new_group(members, backend="gloo", timeout=timeout, use_local_synchronization=True)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do together: where it fails because some do not come, the error names them."""
        if self.size > 1:
            self._roll_call.number += 1
        try:
            yield
        except RuntimeError as error:
            if self.size == 1:
                raise
            raise PeerError(f"rank {dist.get_rank()}, {self.doing}: {self._roll_call.explain(error)}") from error

    def from_first(self, value: Any) -> Any:
        """The first rank's value."""
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self.size
        with self.together():
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def settle(self, problems: Sequence[str], what: str) -> None:
        """Raise on every rank if there is a problem on any; ``what`` is said first."""
        found: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(self.gather(list(problems))):
            for problem in of_rank:
                found.setdefault(problem, []).append(rank)
        if found:
            lines = [_line(problem, on, self.size) for problem, on in found.items()]
            more = [f"and {len(lines) - 20} more"] if len(lines) > 20 else []
            raise CheckpointError("\n  ".join([f"{what}:", *lines[:20], *more]))


def _line(problem: str, on: list[int], size: int) -> str:
    return problem if len(on) == size else f"{problem} (rank {', '.join(map(str, on))})"


_RANKS: WeakKeyDictionary[Sharding, Ranks] = WeakKeyDictionary()


def ranks_of(sharding: Sharding) -> Ranks:
    """The ranks that hold a model. Collective among them the first time."""
    if sharding not in _RANKS:
        _RANKS[sharding] = Ranks(sharding)
    return _RANKS[sharding]
