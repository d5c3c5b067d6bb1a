"""The ranks of a model when they save and load: a group of their own, in which an error of one is an error of all."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fxshard._torch import private
from fxshard._torch.errors import CheckpointError, PeerError
from fxshard.frontend.sharding import Sharding
from fxshard.runtime.channels import domain_ranks


@dataclass(frozen=True)
class Part:
    """The number of a rank's group among several, each with parameters of its own under the same names."""

    index: int
    count: int


class Ranks:
    """A gloo group of its own: a save that runs during training must not mix its messages with those of training."""

    def __init__(self, sharding: Sharding) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        self.doing = "saving or loading a checkpoint"
        """The work that the error of a rank that waits in vain names."""
        members = sharding.agreement.members
        if len(members) > 1:
            self.rank, self.size = members.index(dist.get_rank()), len(members)
            self._missing = MissingRanks(members, private.group_timeout())
            with self.together():
                timeout = self._missing.collectives
                self.group = dist.new_group(members, backend="gloo", timeout=timeout, use_local_synchronization=True)
        self.parts = self._parts(sharding)
        """By the pattern of ``groups=``: which part of what the pattern names this rank has, and of how many."""

    def _parts(self, sharding: Sharding) -> dict[str, Part]:
        groups = {bucket.plan.domain.name: domain_ranks(bucket.mesh) for bucket in sharding.buckets}
        groups.pop("", None)  # the model's own ranks
        found: dict[str, Part] = {}
        tensor = sharding.channels.tensor
        place = tensor.rank if tensor is not None else 0  # ranks of another one have other groups, of the same experts
        everywhere = [each for at, each in self.gather((place, groups)) if at == place] if groups else []
        for pattern, own in groups.items():
            others = sorted({tuple(each[pattern]) for each in everywhere})
            found[pattern] = Part(others.index(tuple(own)), len(others))
        return found

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do together: where it fails because some do not come, the error names them."""
        if self.size > 1:
            self._missing.number += 1
        try:
            yield
        except RuntimeError as error:
            if self.size == 1:
                raise
            raise PeerError(f"rank {dist.get_rank()}, {self.doing}: {self._missing.explain(error)}") from error

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


SECONDS = 5.0
"""How long to wait for answers, where the timeout of the process group is not short itself."""

_MADE: Counter[tuple[int, ...]] = Counter()


class MissingRanks:
    """Finds the ranks that are missing when a collective failed: they do not answer in the store all processes share.

    The collective itself cannot say: gloo reports that time is up, not for whom it waited, and its connections are
    closed by then. So every rank whose collective failed leaves a word in the store. A rank that was stopped, has
    ended, or never came (``if rank == 0: fxshard.save(...)``) does not. ``number`` counts what the ranks have done
    together, so that all ask about the same.
    """

    def __init__(self, members: Sequence[int], timeout: datetime.timedelta) -> None:
        self._members, self._timeout = tuple(members), timeout
        self._patience = min(SECONDS, timeout.total_seconds() / 8)
        _MADE[self._members] += 1
        self._about = f"fxshard/roll call/{self._members[0]}+{len(self._members)}/{_MADE[self._members]}"
        self.number = 0

    @property
    def collectives(self) -> datetime.timedelta:
        """The timeout of a collective, after which there is still time to ask which ranks are missing."""
        return self._timeout - datetime.timedelta(seconds=2 * self._patience)

    def explain(self, error: RuntimeError) -> str:
        """The message about a collective that failed."""
        absent = self._absent()
        if absent is None:
            return (
                "other ranks did not come, and the store of the process group does not answer: the process that holds "
                f"it (rank 0, unless torchrun started the ranks) has ended or was stopped ({error})"
            )
        if not absent:
            return f"all ranks are there, but their communication failed ({error})"
        names = ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent))
        return (
            f"{names} did not come within the timeout of the process group ({self._timeout.total_seconds():g} s), or "
            f"ended: every rank has to make this call, not only some ({error})"
        )

    def _absent(self) -> list[int] | None:
        """The ranks that do not answer; None if the store does not."""
        answer: list[list[int]] = []
        # A store whose process was stopped never answers, and has no timeout for that.
        asking = threading.Thread(target=self._ask, args=(private.default_store(), answer), daemon=True)
        asking.start()
        asking.join(1.5 * self._patience)
        return answer[0] if answer else None

    def _ask(self, store: dist.Store, answer: list[list[int]]) -> None:
        about, until = f"{self._about}/{self.number}", time.monotonic() + self._patience
        try:
            store.set(f"{about}/{dist.get_rank()}", "here")
            while True:
                absent = [rank for rank in self._members if not store.check([f"{about}/{rank}"])]
                if not absent or time.monotonic() > until:
                    answer.append(absent)
                    return
                time.sleep(0.05)
        except RuntimeError:  # the store is gone, too
            return
