"""Muon over sharded matrices: owners hold them whole, or they travel to an owner and back in planned batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fxshard.optim import muon_rule as rule
from fxshard.optim.config import Muon, Scale, Split
from fxshard.optim.device_table import device_table
from fxshard.optim.directions import alike, apply_by_group, in_turns, orthogonal_pieces, update_
from fxshard.optim.fused_weights import Found
from fxshard.optim.groups import param_groups
from fxshard.optim.moments import Moments
from fxshard.optim.parts import PartsExchange, flat
from fxshard.optim.row_moments import row_factors_
from fxshard.optim.sharded import ShardedOptimizer, in_order
from fxshard.optim.verdict import Verdicts
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.exchange import ROW_HALVES, Batch, Travel, cut_alone, parts_alone
from fxshard.planner.optimizer_step import Exchange, Land, Local, Orthogonalize, StepInstruction
from fxshard.planner.parts import Parts
from fxshard.runtime.engine import Engine, Sent

ROUNDED = "rounded"
"""How often the momentum of a group was rounded at random: Muon counts no steps, and no two roundings may be alike."""


@dataclass(frozen=True)
class _Rows:
    """This rank's rows of one of Muon's parameters: the parameter, its gradient and the owner of its momentum."""

    name: str
    value: torch.Tensor
    grad: torch.Tensor | None
    moments: Moments


class ShardedMuon(ShardedOptimizer):
    """The optimizer of ``fxshard.compile(..., optimizer=fxshard.Muon(...))``: Muon's groups first, then AdamW's.

    Equal to Newton–Schulz of the full gradient followed by slicing. Momentum is sharded like the parameters. On a GPU,
    a step whose gradients are not finite changes nothing, and is reported when the next begins or the state is read.
    """

    def __init__(
        self,
        engine: Engine,
        choice: Muon,
        splits: Mapping[str, Split | None],
        order: Sequence[str],
        fused: Mapping[str, Found],
        decided: bool,
    ) -> None:
        self._choice, self._splits = choice, splits
        self.splits = {name: found for name, found in fused.items() if name in splits}
        """Weights that look fused, and how they are cut, or why they are not."""
        groups = param_groups(choice, in_order(engine, order), splits)
        super().__init__(engine, groups, {"lr": choice.lr}, Verdicts(choice.nan, "Muon"), choice.qk_clip, decided)
        self._travelling = {
            travel.name: travel
            for instruction in self._program
            if isinstance(instruction, Exchange)
            for travel in instruction.batch.travels
        }
        self._on_the_way: dict[int, Sent] = {}
        self._values: dict[str, torch.Tensor] = {}
        self._row_factors: dict[tuple[str, Scale], torch.Tensor | float] = {}
        self._tensor = engine.buckets[0].tensor
        self._alone = {
            step.buckets: parts_alone(cut_alone(engine.buckets[i].plan for i in step.buckets), self._place)
            for step in self._program
            if isinstance(step, Local)
        }
        """By the buckets that are updated together, the tensor-parallel parts that this rank holds alone."""
        self._shapes = {name: bucket.shape(name) for bucket in engine.buckets for name in bucket.plan.params}
        """Shapes of whole parameters."""

    def _may_step(self) -> bool:
        may = super()._may_step()
        if may and any(moments.format != "fp32" for moments in self._moments.values()):
            for group in self.param_groups:
                if group["kind"] == "muon":
                    group[ROUNDED] = group.get(ROUNDED, 0) + 1
        return may

    def _run(self, instruction: StepInstruction) -> None:
        match instruction:
            case Local(buckets):
                self._update_alone(buckets, lambda: ShardedOptimizer._run(self, instruction))
            case Exchange(batch):
                self._on_the_way[id(batch)] = self._send(batch)
            case Orthogonalize(batch):
                self._on_the_way[id(batch)] = self._return(batch, self._on_the_way.pop(id(batch)))
            case Land(batch):
                self._apply_returned(batch, self._on_the_way.pop(id(batch)))
            case _:
                super()._run(instruction)

    # -- on this rank ------------------------------------------------------------------------------------------------

    def _update_alone(self, buckets: tuple[int, ...], others: Callable[[], None]) -> None:
        """Matrices that no other data-parallel rank holds rows of. ``others`` updates what is AdamW's, while parts of
        matrices are on the way to other tensor-parallel ranks."""
        rows = {each.name: each for index in buckets for each in self._local_rows(self._moments[index])}
        parts = self._alone[buckets]
        cut = [rows.pop(part.name) for part in parts.members] if parts is not None else []
        sent = self._send_parts(buckets[0], parts, cut) if parts is not None else None
        others()
        self._update([each for each in rows.values() if each.grad is not None])
        if sent is not None:
            self._apply_parts(cut, sent.directions(self._orthogonal))

    def _send_parts(self, bucket: int, parts: Parts, chosen: Sequence[_Rows]) -> PartsExchange:
        """Bring the momentum of this rank's parts up to date and send them to the ranks that orthogonalize them."""
        updates = self._momentum([rows for rows in chosen if rows.grad is not None])
        return PartsExchange(self._engine, bucket, parts, [_or_zeros(updates, rows) for rows in chosen])

    def _apply_parts(self, chosen: Sequence[_Rows], directions: Sequence[torch.Tensor]) -> None:
        pairs = [(rows, found) for rows, found in zip(chosen, directions, strict=True) if rows.grad is not None]
        scaled = [self._scaled(rows.name, direction) for rows, direction in pairs]
        values, groups = [rows.value for rows, _ in pairs], [self._group_of[rows.name] for rows, _ in pairs]
        apply_by_group(values, [found for found, _ in scaled], [factor for _, factor in scaled], groups, self._refused)

    def _place(self, plan: BucketPlan) -> tuple[int, int]:
        """The shard of a bucket that this rank holds, and which of its replicas."""
        bucket = self._engine.buckets[plan.index]
        return bucket.rank, bucket.channels.replica

    def _local_rows(self, moments: Moments) -> Iterable[_Rows]:
        for name in moments.bucket.plan.matrices:
            rows = self._rows(moments, name)
            if name not in self._travelling and rows.value.numel():
                yield rows

    def _rows(self, moments: Moments, name: str) -> _Rows:
        bucket, i = moments.bucket, moments.bucket.plan.layout.index[name]
        fragment = moments.fragments[i]  # of replicas that share state, all of a matrix or nothing
        here = slice(fragment.offset, fragment.offset + fragment.numel)
        if name not in self._values:  # parameters stay where they are, gradients do not
            self._values[name] = bucket.shaped(bucket.master[here], name, fragment)
        has_grad = bucket.params[i].grad is not None and bucket.grad is not None
        grad = bucket.shaped(bucket.grad[here], name, fragment) if has_grad and bucket.grad is not None else None
        return _Rows(name, self._values[name], grad, moments)

    def _update(self, chosen: Sequence[_Rows]) -> None:
        groups = [self._group_of[rows.name] for rows in chosen]
        for members in in_turns(groups, [rows.value for rows in chosen]):
            batch, own = [chosen[i] for i in members], [groups[i] for i in members]
            grads = [rows.grad for rows in batch if rows.grad is not None]
            momenta = [rows.moments.momentum(rows.name) for rows in batch]
            values, splits = [rows.value for rows in batch], [self._splits[rows.name] for rows in batch]
            seconds = [rows.moments.row_moments(rows.name) for rows in batch] if "beta2" in own[0] else None
            update_(values, grads, momenta, splits, own, self._choice.form, self._refused, seconds)
            for rows, second in zip(batch, seconds or (), strict=False):
                rows.moments.keep_row_moments(rows.name, second)
            self._keep(batch, momenta)

    def _keep(self, batch: Sequence[_Rows], momenta: Sequence[torch.Tensor]) -> None:
        """Take back momenta that are kept in another form than they were brought up to date in."""
        for rows, momentum in zip(batch, momenta, strict=True):
            rounded = self._group_of[rows.name].get(ROUNDED, 0)
            rows.moments.keep_momentum(rows.name, momentum, rounded, self._refused)
        if self._transfers is not None:
            self._transfers.end_batch()

    def _momentum(self, chosen: Sequence[_Rows]) -> dict[str, torch.Tensor]:
        """Bring the momenta up to date; returns the updates that are to be orthogonalized, by name."""
        updates: dict[str, torch.Tensor] = {}
        for members in alike(self._group_of[rows.name] for rows in chosen):
            batch = [chosen[i] for i in members]
            grads = [rows.grad for rows in batch if rows.grad is not None]
            momenta = [rows.moments.momentum(rows.name) for rows in batch]
            group = self._group_of[batch[0].name]
            made = rule.momentum_(grads, momenta, group["momentum"], group["nesterov"], self._refused)
            updates.update(zip([rows.name for rows in batch], made, strict=True))
            self._keep(batch, momenta)
        return updates

    def _orthogonal(self, names: Sequence[str], whole: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The directions of whole matrices."""
        directions: dict[int, torch.Tensor] = {}
        for members in alike(self._group_of[name] for name in names):
            splits = [self._splits[names[i]] for i in members]
            group = self._group_of[names[members[0]]]
            done = orthogonal_pieces([whole[i] for i in members], splits, group, self._choice.form)
            for i, split, pieces in zip(members, splits, done, strict=True):
                directions[i] = rule.join_matrices(pieces, split, whole[i].shape)
        return [directions[i] for i in range(len(names))]

    # -- there and back ----------------------------------------------------------------------------------------------

    def _send(self, batch: Batch) -> Sent:
        """Bring the momentum of this rank's rows up to date and send them to the owners of the matrices."""
        rank = self._rank(batch)
        held = _held(batch, rank)
        rows = {travel.name: self._rows(self._moments[travel.bucket], travel.name) for travel in held}
        ready = [rows[travel.name] for travel in held if rows[travel.name].grad is not None]
        updates = self._momentum(ready)
        parts = [_or_zeros(updates, rows[travel.name]) for travel in held]
        if self._choice.beta2 is not None:
            seconds = [rows[travel.name].moments.row_moments(travel.name) for travel in held]
            parts = [torch.cat((part, second), -1) for part, second in zip(parts, seconds, strict=True)]
        sends = flat(parts, torch.float32, self._engine.device)
        return self._engine.exchange(batch.buckets[0], sends, batch.to_owners(rank), batch.from_holders(rank))

    def _return(self, batch: Batch, sent: Sent) -> Sent:
        """Orthogonalize what this rank owns and send each holder its rows of the result."""
        rank = self._rank(batch)
        parts = _received(batch, rank, sent.wait())
        owned = [travel for travel in batch.travels if travel.owner == rank]
        whole = [torch.cat(parts[travel.name]).view(*travel.shape[:-1], -1) for travel in owned]
        names = [travel.name for travel in owned]
        between = batch.parts(rank)
        if between is not None:
            found = PartsExchange(self._engine, batch.buckets[0], between, whole).directions(self._orthogonal)
        else:
            found = (self._orthogonal if self._choice.beta2 is None else self._with_factors)(names, whole)
        directions = {travel.name: direction.reshape(-1) for travel, direction in zip(owned, found, strict=True)}
        back = [
            directions[travel.name][travel.back(begin) : travel.back(begin + numel)]
            for holder in range(batch.ranks)
            for travel in owned
            for begin, numel in [_part(travel, holder)]
            if numel
        ]
        sends = flat(back, torch.bfloat16, self._engine.device)
        sizes = batch.from_holders(rank, back=True), batch.to_owners(rank, back=True)
        return self._engine.exchange(batch.buckets[0], sends, *sizes)

    def _with_factors(self, names: Sequence[str], whole: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """NorMuon: of updates with second moments in their last column, directions in bf16, and after each row its
        factor and its new second moment, each fp32 in two halves. Holders multiply: so nothing is rounded twice.
        """
        updates = [matrix[..., :-1].contiguous() for matrix in whole]
        seconds = [matrix[..., -1:].contiguous() for matrix in whole]
        made: dict[int, torch.Tensor] = {}
        for members in alike(self._group_of[name] for name in names):
            splits, group = [self._splits[names[i]] for i in members], self._group_of[names[members[0]]]
            pieces = orthogonal_pieces([updates[i] for i in members], splits, group, self._choice.form)
            factors = row_factors_(pieces, [seconds[i] for i in members], splits, group["beta2"])
            for i, split, of_one, of_rows in zip(members, splits, pieces, factors, strict=True):
                direction = rule.join_matrices(of_one, split, updates[i].shape)
                factor = rule.join_matrices(of_rows, split, seconds[i].shape).contiguous()
                halves = [numbers.view(torch.bfloat16) for numbers in (factor, seconds[i])]
                made[i] = torch.cat((direction, *halves), -1)
        return [made[i] for i in range(len(names))]

    def _apply_returned(self, batch: Batch, sent: Sent) -> None:
        rank = self._rank(batch)
        held = _held(batch, rank)
        values, directions, factors, groups = [], [], [], []
        sizes = [travel.back(_part(travel, rank)[1]) for travel in held]
        for travel, part in zip(held, sent.wait().split(sizes), strict=True):
            rows = self._rows(self._moments[travel.bucket], travel.name)
            if rows.grad is None:
                continue
            first_row = _part(travel, rank)[0] // travel.shape[-1]
            came = part.view(*rows.value.shape[:-1], -1)
            if travel.row_moments:
                came = self._normalized(rows, came)
            direction, factor = self._scaled(travel.name, came, first_row)
            values.append(rows.value)
            directions.append(direction)
            factors.append(factor)
            groups.append(self._group_of[travel.name])
        apply_by_group(values, directions, factors, groups, self._refused)

    def _normalized(self, rows: _Rows, came: torch.Tensor) -> torch.Tensor:
        """Take apart what ``_with_factors`` made for these rows: keep the second moments, multiply by the factors."""
        direction, halves = came.split((came.shape[-1] - ROW_HALVES, ROW_HALVES), -1)
        factor, moved = halves.clone(memory_format=torch.contiguous_format).view(torch.float32).split(1, -1)
        second = rows.moments.row_moments(rows.name)
        second.copy_(moved if self._refused is None else torch.where(self._refused != 0, second, moved))
        rows.moments.keep_row_moments(rows.name, second)
        return direction * factor

    def _scaled(self, name: str, direction: torch.Tensor, first_row: int = 0) -> tuple[torch.Tensor, float]:
        """Some rows of a direction, and what is left to scale them by: matrices of a split may differ in that."""
        key = (name, self._group_of[name]["scale"])
        if key not in self._row_factors:
            shape = self._shapes[name]
            by_row = _row_factors(shape, self._splits[name], key[1])
            ours = by_row if self._tensor is None else self._tensor.pieces[name].of(by_row.expand(shape))[..., :1]
            ours = ours.narrow(-2, first_row, direction.shape[-2])
            # Asked of the whole matrix: where its pieces differ, they are scaled and rounded before the update.
            different = len(by_row.unique()) > 1
            one_for_all = float(by_row.view(-1)[0])
            self._row_factors[key] = (
                device_table(ours.tolist(), torch.float32, direction.device) if different else one_for_all
            )
        factor = self._row_factors[key]
        if isinstance(factor, torch.Tensor):
            return direction.float() * factor, 1.0
        return direction, factor

    def _rank(self, batch: Batch) -> int:
        return self._moments[batch.travels[0].bucket].bucket.rank


def _row_factors(shape: Sequence[int], split: Split | None, scale: Scale) -> torch.Tensor:
    """The factor of each row of a matrix's direction."""
    one_column = rule.split_matrices(torch.empty(*shape[:-1], 1), split)
    pieces = [(piece, rule.scale_factor((*piece.shape[:-1], shape[-1]), scale)) for piece in one_column]
    by_row = [torch.full_like(piece, factor, dtype=torch.float64) for piece, factor in pieces]
    return rule.join_matrices(by_row, split, (*shape[:-1], 1))


def _or_zeros(updates: Mapping[str, torch.Tensor], rows: _Rows) -> torch.Tensor:
    """The update of a matrix to send. A gradient that is missing here counts as zero: the exchange has the same shape
    whatever happens."""
    return updates[rows.name] if rows.name in updates else torch.zeros_like(rows.value)


def _held(batch: Batch, rank: int) -> list[Travel]:
    """The matrices that a rank holds rows of, by owner: the order in which they are sent and come back."""
    ours = [travel for travel in batch.travels if _part(travel, rank)[1]]
    return sorted(ours, key=lambda travel: travel.owner)  # stable: within an owner, the order of the batch


def _part(travel: Travel, rank: int) -> tuple[int, int]:
    """(first element, number of elements) of a rank's rows of a matrix."""
    begin = 0
    for holder, numel in travel.parts:
        if holder == rank:
            return begin, numel
        begin += numel
    return begin, 0


def _received(batch: Batch, rank: int, flat: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """The rows that every holder sent of the matrices this rank owns, by matrix, in the order of rows."""
    parts: dict[str, list[torch.Tensor]] = {travel.name: [] for travel in batch.travels if travel.owner == rank}
    cursor = 0
    for holder in range(batch.ranks):
        for travel in batch.travels:
            numel = travel.there(_part(travel, holder)[1]) if travel.owner == rank else 0
            if numel:
                parts[travel.name].append(flat[cursor : cursor + numel])
                cursor += numel
    return parts
