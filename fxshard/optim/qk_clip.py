"""QK-clip (MuonClip, arXiv 2507.20534): weights of queries and keys shrink where an attention logit was too large.

If the largest logit of a head exceeded ``limit`` in this step, by all ranks and micro-batches, the rows of the weights
that make the head's queries and keys are each multiplied by √(limit / logit), after the update. Where heads share keys,
the keys stay, and the queries of the head are multiplied by limit / logit: so no head changes another one, as in the
paper for the part of keys that all its heads share. Tensor-parallel ranks that have heads of their own scale those.
"""

from __future__ import annotations

import torch

from fxshard._torch.errors import StateError
from fxshard.optim.device_table import device_table
from fxshard.planner.head_rows import AttentionHeads
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.engine import Engine


class QKClip:
    """Scales this rank's rows, bucket by bucket, once all of a bucket is updated."""

    def __init__(self, engine: Engine, limit: float) -> None:
        self._engine, self._limit = engine, limit
        self._largest: torch.Tensor | None = None
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None
        """This step's factors by head, then a one: for queries that share keys, and their roots for others."""
        self._places: dict[str, list[tuple[torch.Tensor, bool]]] | None = None
        """For each parameter of this rank: for each of its rows the place of its factor, and whether that is a root."""

    def take(self) -> None:
        """Take what was measured for this step: whatever becomes of it, the next has its own."""
        self._largest = self._engine.logits.take()

    def begin(self, refused: torch.Tensor | None) -> None:
        """Compute the factors of heads from their largest logits on all ranks. Collective."""
        if self._largest is None:
            raise StateError(
                "qk_clip: no attention was measured since the last step: step() follows forward and backward of the "
                "compiled model, whose list of passes has measure_logits"
            )
        own = [self._is_cut(each.query.weight) for each in self._engine.logits.heads for _ in range(each.heads)]
        largest = self._engine.largest_on_all_ranks(self._largest, "the largest attention logits", own)
        above = (largest > self._limit) & largest.isfinite()
        if refused is not None:
            above &= refused == 0  # a step that is not made clips nothing
        factors = torch.where(above, self._limit / largest, 1.0)
        factors = torch.cat((factors, factors.new_ones(1)))
        self._factors = factors, factors.sqrt()
        if self._places is None:
            self._places = self._find_places()

    def _is_cut(self, name: str) -> bool:
        """Whether other tensor-parallel ranks have other rows of a parameter."""
        tensor = self._engine.buckets[0].tensor
        return tensor is not None and tensor.pieces[name].dim == 0

    def _shares_keys(self, attention: AttentionHeads) -> bool:
        """Also where every tensor-parallel rank has the same keys, for heads of its own."""
        cut_queries = self._is_cut(attention.query.weight) and not self._is_cut(attention.key.weight)
        return attention.shares_keys or cut_queries

    def apply(self, bucket: Bucket) -> None:
        """Scale the rows of a bucket that has its new values."""
        assert self._factors is not None and self._places is not None
        for fragment in bucket.fragments:
            for places, root in self._places.get(fragment.name, ()):
                rows = bucket.master[fragment.offset : fragment.offset + fragment.numel].view(len(places), -1)
                rows.mul_(self._factors[root][places].unsqueeze(-1))

    def _find_places(self) -> dict[str, list[tuple[torch.Tensor, bool]]]:
        found: dict[str, list[tuple[torch.Tensor, bool]]] = {}
        fragments = {f.name: f for bucket in self._engine.buckets for f in bucket.fragments if f.numel}
        first, end = 0, sum(attention.heads for attention in self._engine.logits.heads)
        for attention in self._engine.logits.heads:
            shared = self._shares_keys(attention)
            for projection in (attention.query,) if shared else (attention.query, attention.key):
                places = [end if head < 0 else first + head for head in projection.head_of_row]
                for name in filter(None, (projection.weight, projection.bias)):
                    if name in fragments:
                        own = places[fragments[name].row_start : fragments[name].row_stop]
                        place = device_table(own, torch.int64, self._engine.device), not shared
                        found.setdefault(name, []).append(place)
            first += attention.heads
        return found
