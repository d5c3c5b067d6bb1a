"""Reduced gradients become ``parameter.grad``: those that a graph wrote, on this rank or on another one.

A parameter that no rank used in a backward keeps its ``.grad``, which is None as a rule, so that optimizers leave it
alone as they do in plain PyTorch. Which gradients a program writes is known when it is compiled. Only where one may
leave some out do the ranks ask each other: once in a backward, over the side channel, without a look at the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from fxshard._torch import private
from fxshard.runtime.agreement import Agreement
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.channels import domain_ranks

Written = frozenset[int]
"""Positions in a bucket of the parameters that a gradient was written for."""


class Publishing:
    """The gradients of one backward program, from their reduction until parameters have them."""

    def __init__(self, buckets: Sequence[Bucket], agreement: Agreement | None) -> None:
        self._buckets = buckets
        self._agreement = agreement
        self.due: dict[int, Written] = {}
        """By bucket, what was reduced and is not published yet."""
        self._hooked: dict[tuple[int, int], None] = {}
        """Parameters, as (bucket, position), whose hooks are to be called when the backward that runs is over."""

    def publish(self) -> None:
        """Give parameters the gradients that were reduced. Collective where ranks may have used different ones."""
        due, self.due = self.due, {}
        shared = {i: written for i, written in due.items() if self._buckets[i].reducing is not None}
        if shared and self._agreement is not None and self._agreement.uses_may_differ:
            due |= self._on_any_rank(shared, self._agreement)
        for index, written in due.items():
            bucket = self._buckets[index]
            bucket.hold_gradient()
            bucket.publish_gradients(written)
            self.call_hooks(index, written)

    def call_hooks(self, index: int, written: Collection[int]) -> None:
        """When this backward is over, call the hooks of parameters that got a gradient: once, however many graphs it
        has gone through.
        """
        hooked = [(index, position) for position in self._buckets[index].hooks if position in written]
        if not hooked:
            return
        if not self._hooked:
            private.after_backward(self._call_hooks)
        self._hooked.update(dict.fromkeys(hooked))

    def _call_hooks(self) -> None:
        hooked, self._hooked = self._hooked, {}
        for index, position in hooked:
            bucket = self._buckets[index]
            for hook in list(bucket.hooks[position].values()):
                hook(bucket.params[position])

    def _on_any_rank(self, due: dict[int, Written], agreement: Agreement) -> dict[int, Written]:
        """What some rank that holds the same parameters wrote. All ranks reduce the same buckets."""
        lines = {index: self._line(self._buckets[index], agreement.members) for index in sorted(due)}
        flags = [
            torch.zeros(count, len(self._buckets[index].params), dtype=torch.uint8)
            for index, (_, count) in lines.items()
        ]
        for (index, (line, _)), own in zip(lines.items(), flags, strict=True):
            own[line, list(due[index])] = 1
        anywhere = agreement.largest(torch.cat([own.view(-1) for own in flags]), "which parameters got gradients")
        parts = anywhere.split([own.numel() for own in flags])
        return {
            index: frozenset(part.view(own.shape)[line].nonzero().view(-1).tolist())
            for (index, (line, _)), own, part in zip(lines.items(), flags, parts, strict=True)
        }

    @staticmethod
    def _line(bucket: Bucket, members: Sequence[int]) -> tuple[int, int]:
        """(line, of how many): experts with ranks of their own are other parameters on other ranks."""
        if not bucket.plan.domain.name:
            return 0, 1
        return members.index(min(domain_ranks(bucket.mesh))), len(members)
