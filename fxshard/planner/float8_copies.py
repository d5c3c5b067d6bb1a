"""Buckets whose unsharded parameters are float8: what rests, what travels, and what a graph is given.

A copy is a byte per element, in the order of the bucket, so the copies of the shards, one after another, are the copy
of the bucket. Scales do not travel with it: the largest magnitudes of all weights are combined over ranks before
anything is quantized, so every rank has all scales, and owners quantize their rows as if they had all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fxshard.kernels.float8 import BLOCK, COLUMNWISE, E4M3, LARGEST, ROWWISE, Scaling, largest_of, spread
from fxshard.kernels.float8_cast import cast_into
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.gather_modes import Copies
from fxshard.planner.gathered import Transfer, Views
from fxshard.planner.layout import Fragment


class Float8Copies:
    """Copies of a bucket that a rank holds between steps: of everything or of its shard, and the scales of all."""

    def __init__(self, plan: BucketPlan, rank: int, device: torch.device) -> None:
        assert plan.float8 is not None
        self.plan, self.recipe = plan, plan.float8
        self.memory = torch.zeros(plan.all_copies.number * self._held, dtype=torch.uint8, device=device)
        self.quantized = 0
        """How often the copies were made anew."""
        self._begin = rank * plan.layout.shard_numel if plan.resident else 0
        self._own = [(i, part) for i, part in enumerate(plan.layout.fragments(rank)) if part.rows]
        self._parts: list[tuple[int, Fragment, torch.Tensor]] = []
        self._fills: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._resident_views: Views = ()
        self.largest: torch.Tensor
        self.scales: torch.Tensor

    @property
    def _held(self) -> int:
        return self.plan.layout.numel if self.plan.resident else self.plan.layout.shard_numel

    # -- scales ------------------------------------------------------------------------------------------------------

    def bind(self, largest: torch.Tensor, scales: torch.Tensor) -> None:
        """Where the largest magnitudes and the scales of these weights lie, among those of all weights."""
        self.largest, self.scales = largest, scales

    def parts(self, master: torch.Tensor) -> list[tuple[int, Fragment, torch.Tensor]]:
        """For each weight of which this rank has rows: its number, where the rows lie, the rows. Made once."""
        if not self._parts:
            self._parts = [(i, part, self._rows(master, i, part)) for i, part in self._own]
        return self._parts

    def measure(self, master: torch.Tensor) -> None:
        """Write down the largest magnitudes of this rank's rows, if scales are of rows or blocks; others stay."""
        into = self._of_scales(self.largest)
        for i, part, rows in self.parts(master):
            for copy, axis in enumerate((ROWWISE, COLUMNWISE)[: self.recipe.copies]):
                found = largest_of(rows, self.recipe.scaling, axis, weight=True)
                self._scales_of_rows(into[i * self.recipe.copies + copy], part, axis).copy_(found)

    def _of_scales(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The matrices of scales in a flat tensor of them."""
        pairs = zip(self.plan.scale_spans, self.plan.scale_shapes, strict=True)
        return [flat[begin:end].view(shape) for (begin, end), shape in pairs]

    def _scales_of_rows(self, scales: torch.Tensor, part: Fragment, axis: int) -> torch.Tensor:
        """The scales that some rows of a weight need."""
        if self.recipe.scaling is Scaling.BLOCK:
            return scales[part.row_start // BLOCK : -(-part.row_stop // BLOCK)]
        by_row = self.recipe.scaling is Scaling.ROW and axis == ROWWISE
        return scales[part.row_start : part.row_stop] if by_row else scales

    def _rows(self, master: torch.Tensor, i: int, part: Fragment) -> torch.Tensor:
        columns = self.plan.layout.slots[i].spec.shape[1]
        return master[part.offset : part.offset + part.numel].view(part.rows, columns)

    # -- copies ------------------------------------------------------------------------------------------------------

    def fill(self, master: torch.Tensor) -> None:
        """Quantize this rank's rows, rounded to bf16 first, so that all ways to gather agree."""
        self.quantized += 1
        if not self._fills:
            self._fills = list(self._places(master))
        for rows, scales, payload in self._fills:
            cast_into(rows, scales, plain=payload)

    def differ_from(self, master: torch.Tensor) -> torch.Tensor:
        """Whether this rank's rows, quantized with the same scales, would be anything else than what rests here, or
        too large for these scales.
        """
        found = [torch.zeros((), dtype=torch.bool, device=master.device)]
        for rows, scales, payload in self._fills:
            again = torch.empty_like(payload)
            cast_into(rows, scales, plain=again)
            found.append((again.view(torch.uint8) != payload.view(torch.uint8)).any())
            found.append((rows.bfloat16().abs() > LARGEST[E4M3] * spread(scales, rows.shape)).any())
        return torch.stack(found).any()

    def _places(self, master: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(rows of a weight, their scales, where they go) for each copy."""
        scales = self._of_scales(self.scales)
        for copy in range(self.recipe.copies):
            payload = self.memory.split(self._held)[copy].view(E4M3)[self._begin :]
            for i, part, rows in self.parts(master):
                own = self._scales_of_rows(scales[i * self.recipe.copies + copy], part, (ROWWISE, COLUMNWISE)[copy])
                yield rows, own, payload[part.offset : part.offset + part.numel].view(rows.shape)

    def views(self) -> Views:
        """Views of the resting copies, where these are of everything."""
        if not self._resident_views:
            self._resident_views = self._views(self.memory, self.plan.all_copies)
        return self._resident_views

    def _views(self, memory: torch.Tensor, copies: Copies) -> Views:
        """Inputs of a graph for each parameter: payload and scales of each copy that there is."""
        numel, scales = self.plan.layout.numel, self._of_scales(self.scales)
        found: list[torch.Tensor | None] = []
        for i, slot in enumerate(self.plan.layout.slots):
            for copy, there in enumerate((copies.rowwise, copies.columnwise)):
                if not there:
                    found += [None, None]
                    continue
                begin = (copy * copies.rowwise) * numel  # the second, unless it is the only one
                payload = memory[begin + slot.offset : begin + slot.end].view(E4M3).view(slot.spec.shape)
                found += [payload, scales[i * self.recipe.copies + copy]]
        return tuple(found)

    def transfer(self, master: torch.Tensor, memory: torch.Tensor | None, copies: Copies, stale: bool) -> Transfer:
        """A gather of owners' copies, as bytes, into ``memory``, or into what rests here if that is everything."""
        layout = self.plan.layout
        stage: Callable[[], None] | None = (lambda: self.fill(master)) if stale else None
        if memory is None:
            shard = slice(self._begin, self._begin + layout.shard_numel)
            wholes = self.memory.split(self._held)
            moves = tuple((whole, whole[shard]) for whole in wholes) if layout.ranks > 1 else ()
            return Transfer(moves, self.views, stage=stage)
        there = memory.split(layout.numel)
        wanted = [copy for copy, asked in enumerate((copies.rowwise, copies.columnwise)) if asked]
        moves = tuple((there[i], self.memory.split(self._held)[copy]) for i, copy in enumerate(wanted))
        return Transfer(
            moves, lambda: self._views(memory, copies), stage=stage, apart=lambda: self._views(memory.clone(), copies)
        )
