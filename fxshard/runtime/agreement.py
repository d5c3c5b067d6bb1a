"""Ranks agree before they communicate: a difference or a failure anywhere is an error everywhere, not a hang."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from fxshard._torch import private
from fxshard._torch.errors import PeerError, RankDivergenceError
from fxshard.runtime.watchdog import failing, waiting

T = TypeVar("T")

PARAMETERS, COMMUNICATION = "the parameter plan", "the communication schedule"
"""What ranks compare: how parameters are cut, and which collectives a step makes."""

_Told = tuple[str | None, list[str], bool]
"""What a rank tells the others: why it failed, its lines, and whether its program may leave gradients out."""


class Agreement:
    """A side channel (gloo, whatever the model runs on) over which ranks compare what they are about to do."""

    def __init__(self, members: list[int] | None) -> None:
        self._control: dist.ProcessGroup | None = None
        self._agreed: dict[str, set[int]] = {}
        self._latest: dict[str, list[str]] = {}
        self.members: list[int] = members or []
        self.uses_may_differ = False
        """Whether some rank has a program that may leave gradients out. The same on all ranks."""
        if members is not None and len(members) > 1:
            self._timeout = private.group_timeout()
            self._control = dist.new_group(
                members, backend="gloo", timeout=self._timeout, use_local_synchronization=True
            )

    def settled(self, topic: str) -> bool:
        """Whether the ranks have agreed on ``topic`` before: only until then do they wait for each other there."""
        return self._control is None or topic in self._agreed

    def check(self, topic: str, mine: list[str], *, leaves_out: str = "") -> None:
        """Compare a list of lines with every rank's; raise on all of them, naming the first line that differs.

        What was agreed once is not compared again: a rank may recompile alone (another batch size) as long as it
        communicates as before. ``leaves_out``: parameters of which a program may leave out gradients, in words. The
        first such program is told of, whatever it communicates, because all ranks exchange more from then on.
        """
        key = hash(tuple(mine))
        known = key in self._agreed.get(topic, ())
        if self._control is None or (known and (self.uses_may_differ or not leaves_out)):
            return
        try:
            theirs = self._exchange((None, mine, bool(leaves_out)))
        except PeerError as error:
            before = self._latest.get(topic)
            if before is None:
                raise
            what = f"makes no gradients for {leaves_out}" if known else _first_difference(topic, "before", mine, before)
            raise PeerError(
                f"rank {dist.get_rank()} compiled a program that communicates in a new way, and the other ranks did "
                "not do the same in the time the process group allows (does forward depend on the rank, or on data "
                f"that only this rank has?): {what}\n{error}"
            ) from error
        for rank, (failure, lines, _) in enumerate(theirs):
            if failure is not None:
                raise PeerError(f"rank {rank} failed while the ranks prepared {topic}: {failure}")
            if lines != mine:
                raise RankDivergenceError(_first_difference(topic, f"on rank {rank}", mine, lines))
        self._agreed.setdefault(topic, set()).add(key)
        self._latest[topic] = mine
        self.uses_may_differ |= any(leaves for _, _, leaves in theirs)

    def largest(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """The largest of each of some numbers on the host, over all ranks. Collective. ``what`` they are, in words."""
        if self._control is not None:
            with failing(f"all_reduce of {what}", dist.get_rank()):
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._control)
        return values

    def fail(self, error: Exception) -> NoReturn:
        """Tell the other ranks that this one cannot go on, then raise."""
        if self._control is not None:
            self._exchange((f"{type(error).__name__}: {error}", [], False))
        raise error

    def share(self, mine: T) -> list[T]:
        """What every rank gives, in order of ranks, on all of them. A collective call."""
        if self._control is None:
            return [mine]
        gathered: list[Any] = [None] * self._control.size()
        dist.all_gather_object(gathered, mine, group=self._control)
        return gathered

    def meet(self, call: str) -> None:
        """Wait for all ranks at ``call``, a method that is collective: scripts that call it on one rank are told so."""
        if self._control is not None:
            with waiting(call, dist.get_rank(), self._timeout):
                self.share(None)

    def _exchange(self, mine: _Told) -> list[_Told]:
        try:
            return self.share(mine)
        except RuntimeError as error:
            raise PeerError(
                f"another rank ended or did not answer while the ranks compared their plans: {error}"
            ) from error


def _first_difference(topic: str, other: str, mine: list[str], theirs: list[str]) -> str:
    for i, (here, there) in enumerate(zip(mine, theirs, strict=False)):
        if here != there:
            return f"{topic} is not what it is {other}, from entry {i} on:\n  here: {here}\n  {other}: {there}"
    longer = "here" if len(mine) > len(theirs) else other
    extra = (mine if len(mine) > len(theirs) else theirs)[min(len(mine), len(theirs))]
    return f"{topic} has {len(mine)} entries here and {len(theirs)} {other}; the first one only {longer}: {extra}"
