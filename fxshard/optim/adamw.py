"""AdamW over the flat shards of buckets: the formula is torch's fused kernel, the pass is one per bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxshard import _compat
from fxshard.config import AdamW
from fxshard.runtime.bucket import Bucket


class _Moments:
    """The optimizer state of one bucket: two flat moments and a step count per parameter.

    The counts exist twice: as numbers, to find neighbours that can be updated together without asking the device, and
    as a tensor, which is what the kernel reads.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.first = torch.zeros_like(bucket.master)
        self.second = torch.zeros_like(bucket.master)
        self.counts = [0] * len(bucket.params)
        self.steps = torch.zeros(len(bucket.params), dtype=torch.float32, device=bucket.device)

    def count_step(self) -> None:
        """One more step for every parameter that has a gradient."""
        with_grad = [i for i, parameter in enumerate(self.bucket.params) if parameter.grad is not None]
        for i in with_grad:
            self.counts[i] += 1
        if len(with_grad) == len(self.counts):
            self.steps.add_(1)
        elif with_grad:
            self.steps[with_grad] += 1

    def stretches(self, group_of: dict[int, int]) -> Iterator[tuple[int, list[int]]]:
        """(group, positions) of local neighbours that one call can update: same group, same step, with gradients."""
        current: list[int] = []
        previous: tuple[int, int] | None = None
        for i, (fragment, parameter) in enumerate(zip(self.bucket.fragments, self.bucket.params, strict=True)):
            if not fragment.numel:
                continue
            kind = (group_of[id(parameter)], self.counts[i]) if parameter.grad is not None else None
            if current and kind != previous:
                assert previous is not None
                yield previous[0], current
                current = []
            if kind is not None:
                current.append(i)
            previous = kind
        if current and previous is not None:
            yield previous[0], current

    def tensors(self, positions: list[int]) -> tuple[torch.Tensor, ...]:
        """(master, gradient, moments, step) of one stretch."""
        bucket = self.bucket
        assert bucket.grad is not None
        begin, last = bucket.fragments[positions[0]], bucket.fragments[positions[-1]]
        where = slice(begin.offset, last.offset + last.numel)
        return (
            bucket.master[where],
            bucket.grad[where],
            self.first[where],
            self.second[where],
            self.steps[positions[0]],
        )


class ShardedAdamW(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` over the sharded parameters: LR schedulers, groups and ``state_dict`` work as usual.

    Moments live in one flat tensor per bucket; ``state[p]`` holds views of it. Parameters of a bucket that share a
    group and lie side by side are updated as one tensor, which for most models is the whole shard.
    """

    def __init__(self, buckets: Sequence[Bucket], choice: AdamW) -> None:
        trained = [bucket for bucket in buckets if bucket.plan.trainable]
        defaults = {"lr": choice.lr, "betas": choice.betas, "eps": choice.eps, "weight_decay": choice.weight_decay}
        super().__init__(_groups(trained, choice), defaults)
        self._moments = [_Moments(bucket) for bucket in trained]
        self._bind_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, pieces in zip(self.param_groups, self._pieces(), strict=True):
            if pieces:
                masters, grads, firsts, seconds, steps = (list(column) for column in zip(*pieces, strict=True))
                _compat.fused_adamw(
                    masters,
                    grads,
                    firsts,
                    seconds,
                    steps,
                    lr=group["lr"],
                    betas=group["betas"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for moments in self._moments:
            moments.bucket.release_gradient()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for moments in self._moments:
                for i, (fragment, parameter) in enumerate(
                    zip(moments.bucket.fragments, moments.bucket.params, strict=True)
                ):
                    loaded = self.state[parameter]
                    where = slice(fragment.offset, fragment.offset + fragment.numel)
                    moments.first[where].copy_(_local(loaded["exp_avg"]).reshape(-1))
                    moments.second[where].copy_(_local(loaded["exp_avg_sq"]).reshape(-1))
                    moments.counts[i] = int(loaded["step"])
                moments.steps.copy_(torch.tensor(moments.counts, dtype=torch.float32))
        self._bind_state()

    def _bind_state(self) -> None:
        for moments in self._moments:
            bucket = moments.bucket
            for i, (name, parameter) in enumerate(zip(bucket.plan.params, bucket.params, strict=True)):
                self.state[parameter] = {
                    "step": moments.steps[i],
                    "exp_avg": bucket.as_param(moments.first, name),
                    "exp_avg_sq": bucket.as_param(moments.second, name),
                }

    def _pieces(self) -> list[list[tuple[torch.Tensor, ...]]]:
        """What each group's kernel call gets."""
        group_of = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        pieces: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in self.param_groups]
        for moments in self._moments:
            moments.bucket.adopt_gradients()
            moments.count_step()
            for group, positions in moments.stretches(group_of):
                pieces[group].append(moments.tensors(positions))
        return pieces


def _groups(buckets: Sequence[Bucket], choice: AdamW) -> list[dict[str, Any]]:
    """One group of parameters that decay, and one of those that do not, each where there are any."""
    members: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for bucket in buckets:
        for slot, parameter in zip(bucket.plan.layout.slots, bucket.params, strict=True):
            decays = choice.decay is None or choice.decay(slot.spec.name, slot.spec.shape)
            members[decays].append(parameter)
    return [
        {"params": params, "weight_decay": choice.weight_decay if decays else 0.0}
        for decays, params in members.items()
        if params
    ]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor
