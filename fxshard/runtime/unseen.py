"""Changes of shards that no version counter sees: what was gathered before them must not be used as if it were current.

Version counters see almost every change (``optimizer_steps``). They do not see writes through ``parameter.data``,
through ``torch._foreach`` functions on DTensors, or by a user's kernel. So where a program uses what was gathered
earlier, this rank's part of it is compared with the shard, rounded or quantized to float8 again. Where that part is not
at hand (still under way, quantized otherwise, given away, or the shard itself), the bits of the shard are added up when
it is gathered, and again: a pass more.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fxshard._torch.errors import StateError
from fxshard.planner.float8_copies import Float8Copies
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.streams import Streams, Token


class Unseen:
    """Remembers what shards held when they were gathered, and refuses to go on where they changed unseen.

    On the CPU the answer is there at once. On CUDA the host does not wait for it: the programs that follow look at it.
    """

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._streams = streams
        self._pin = device.type == "cuda"
        self._then: dict[int, torch.Tensor] = {}
        self._open: list[tuple[Token, torch.Tensor, list[str]]] = []

    def gathered(self, bucket: Bucket) -> None:
        """A bucket has just been gathered, or is being gathered."""
        plan, full = bucket.plan, bucket.full
        if full is not None and plan.master_dtype != plan.param_dtype:  # were they equal, the shard would be part of it
            self._then[plan.index] = bucket.own_slice(full)
        else:
            self._then[plan.index] = _sum_of_bits(bucket.master)

    def compare(self, buckets: Iterable[Bucket], *, at_rest: bool = True) -> None:
        """These are used as they were gathered; ``at_rest``: as copies at rest where they rest in float8."""
        differ: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            if at_rest and isinstance(bucket.copies, Float8Copies):
                differ[bucket.plan.name] = bucket.copies.differ_from(bucket.master)
            elif bucket.plan.index in self._then:
                differ[bucket.plan.name] = _differs(self._then[bucket.plan.index], bucket.master)
        if differ:
            differs = torch.empty(len(differ), dtype=torch.bool, pin_memory=self._pin)
            differs.copy_(torch.stack(list(differ.values())), non_blocking=True)
            self._open.append((self._streams.mark(), differs, list(differ)))
        self._look()

    def _look(self) -> None:
        """Read the answers that are there."""
        while self._open and self._open[0][0].done():
            _, differs, names = self._open.pop(0)
            changed = [name for name, differ in zip(names, differs.tolist(), strict=True) if differ]
            if changed:
                raise StateError(
                    f"parameters of {', '.join(map(repr, changed[:3]))}{', …' * (len(changed) > 3)} were changed in a "
                    "way that leaves no trace (through .data, torch._foreach functions or a kernel of your own) since "
                    "they were gathered: change the parameters themselves under torch.no_grad(), or call "
                    "model.parameters_changed() after the change, on every rank"
                )


def _differs(then: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Whether a shard is no longer what was gathered of it. Bits are compared: a NaN that stays is no change."""
    if then.ndim == 0:
        return then != _sum_of_bits(shard)
    same_size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[then.element_size()]
    return (then.view(same_size) != shard.detach().to(then.dtype).view(same_size)).any()


def _sum_of_bits(shard: torch.Tensor) -> torch.Tensor:
    return shard.detach().view(torch.int64).sum()  # shards are aligned: whole words of eight bytes
