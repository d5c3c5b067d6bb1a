"""How many steps each parameter of a bucket made, and which of its rows this rank keeps state of."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from fxshard._torch.errors import StateError
from fxshard.optim.device_table import device_table
from fxshard.planner.layout import Fragment, shares, within
from fxshard.runtime.bucket import Bucket


class StepCounts:
    """A step count per parameter of AdamW's.

    The counts exist twice: as numbers, to find what can be updated together without asking the device, and as a tensor,
    which is what kernels read and checkpoints hold.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.muon = frozenset(bucket.plan.matrices)
        layout = bucket.plan.layout
        self.shares = [(0, layout.shard_numel)]
        """The stretch of the shard that each of its replicas updates."""
        self.begin, self.end = self.shares[0]
        self.fragments = bucket.fragments
        if bucket.plan.shares_state:
            self.shares = shares(layout, bucket.rank, bucket.plan.domain.replicas, bucket.plan.matrices)
            self.begin, self.end = self.shares[bucket.channels.replica]
            self.fragments = tuple(within(layout, fragment, self.begin, self.end) for fragment in bucket.fragments)
        self.counts = [0] * len(bucket.params)
        self.steps = torch.zeros(len(bucket.params), dtype=torch.float32, device=bucket.device)
        self._counted: list[int] = []
        self._ones = torch.zeros_like(self.steps)

    def count_step(self, allowed: torch.Tensor | None) -> None:
        """One more step for every parameter of AdamW's that has a gradient.

        With ``allowed``, one or zero on the device, the tensor counts only what is allowed, and the numbers assume that
        it is, until ``take_back``.
        """
        params, names = self.bucket.params, self.bucket.plan.params
        with_grad = [i for i, p in enumerate(params) if p.grad is not None and names[i] not in self.muon]
        for i in with_grad:
            self.counts[i] += 1
        if with_grad != self._counted:
            # Kept from step to step: to index with a list would copy it every time, and the host would wait for that.
            ones = [float(i in with_grad) for i in range(len(params))]
            self._counted, self._ones = with_grad, device_table(ones, torch.float32, self.steps.device)
        if not with_grad:
            return
        if allowed is None:
            self.steps.add_(self._ones)
        else:
            self.steps.addcmul_(self._ones, allowed)

    def take_back(self) -> None:
        """The last step turned out not to be allowed."""
        for i in self._counted:
            self.counts[i] -= 1

    def recount(self) -> None:
        """Take the step counts over from the tensor."""
        self.counts = [int(step) for step in self.steps.tolist()]

    def set_count(self, i: int, steps: int) -> None:
        self.counts[i] = steps
        self.steps[i] = float(steps)


def own_rows(bucket: Bucket, tensor: torch.Tensor, fragment: Fragment, numel: int | None) -> torch.Tensor:
    """This rank's elements of sharded or of whole state, flat. ``numel``: how many, if not one for each parameter's."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        if local.numel() != (fragment.numel if numel is None else numel):
            raise StateError(
                f"the state of {fragment.name} is sharded in another way than the parameter: fxshard.save and "
                "fxshard.load move state between layouts and numbers of ranks"
            )
        return local.reshape(-1)
    part = bucket.part(fragment.name, tensor)
    return part[fragment.row_start : fragment.row_stop].reshape(-1) if part.ndim else part.view(-1)[: fragment.numel]
