"""Whole layout: no parameter crosses a shard boundary, so an owner holds whole matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from fxshard._torch.errors import ConfigError
from fxshard.planner.layout import Layout, Slot, TensorSpec, aligned, require_all_placed
from fxshard.planner.matrices import least_loaded, matrix_cost
from fxshard.planner.rows import row_layout
from fxshard.planner.tuning import MOST_WHOLE


def whole_layout(specs: Sequence[TensorSpec], ranks: int, work: Sequence[float] = ()) -> Layout:
    """Give every parameter to one rank, with shards as short as equal sizes and greedy packing make them.

    Parameters of the same size are dealt out first, one to each rank: identical blocks over a rank count that divides
    them leave no padding. What remains is packed largest first onto the emptiest rank. Where a large parameter without
    peers would stick out at the end, everything is packed largest first: it is surrounded by smaller ones instead of by
    padding.

    ``work`` is what earlier buckets give each rank to orthogonalize: the rank with the least so far gets the most of
    this one. Handing a rank another rank's share does not change the length of any shard, so balance costs no padding.

    >>> layout = whole_layout([TensorSpec(f"w{i}", (64, 64)) for i in range(4)], ranks=2)
    >>> layout.padding, [layout.owner(name) for name in layout.names]
    (0, [0, 0, 1, 1])
    """
    packings = (_packed(specs, ranks, deal=True), _packed(specs, ranks, deal=False))
    owned = min(packings, key=_longest)  # the first where both are equally long
    shard_numel = _longest(owned)
    if work:
        owned = _dealt_by_work(owned, work)
    order = {spec.name: i for i, spec in enumerate(specs)}
    slots: list[Slot] = []
    for rank, specs_of_rank in enumerate(owned):
        cursor = rank * shard_numel
        for spec in sorted(specs_of_rank, key=lambda spec: order[spec.name]):
            slots.append(Slot(spec, cursor))
            cursor += aligned(spec.numel)
    return require_all_placed(specs, Layout(ranks, shard_numel, tuple(slots), whole=True))


def check_padding(layouts: Mapping[str, Layout]) -> None:
    """Raise ``ConfigError`` if the whole ones among the layouts of buckets, by name, are mostly padding."""
    whole = {name: layout for name, layout in layouts.items() if layout.whole}
    held = sum(layout.numel for layout in whole.values())
    with_rows = sum(row_layout([slot.spec for slot in it.slots], it.ranks).numel for it in whole.values())
    if held <= MOST_WHOLE * with_rows:
        return
    padding = sum(layout.padding for layout in whole.values())
    name, most = max(whole.items(), key=lambda item: item[1].padding)
    raise ConfigError(
        f"layout='whole' on {most.ranks} ranks would add {padding / (held - padding):.0%} of the parameters as padding"
        f", most of all in {name} ({len(most.slots)} parameters): choose layout='auto' or 'rows', larger units= so "
        "that a bucket has more parameters of a size than ranks, or replicate with a mesh of two dimensions"
    )


def _packed(specs: Sequence[TensorSpec], ranks: int, *, deal: bool) -> list[list[TensorSpec]]:
    """Each rank's parameters, packed largest first; with ``deal``, those of each size that fill all ranks go first."""
    by_size: dict[int, list[TensorSpec]] = defaultdict(list)
    for spec in specs:
        by_size[aligned(spec.numel)].append(spec)

    owned: list[list[TensorSpec]] = [[] for _ in range(ranks)]
    left: list[TensorSpec] = []
    for same in by_size.values():
        full_rounds = len(same) // ranks * ranks if deal else 0
        for i, spec in enumerate(same[:full_rounds]):
            owned[i % ranks].append(spec)
        left += same[full_rounds:]

    load = [_length(specs_of_rank) for specs_of_rank in owned]
    for spec in sorted(left, key=lambda spec: -spec.numel):  # stable: equal sizes keep the given order
        rank = least_loaded(load)
        owned[rank].append(spec)
        load[rank] += aligned(spec.numel)
    return owned


def _dealt_by_work(owned: list[list[TensorSpec]], work: Sequence[float]) -> list[list[TensorSpec]]:
    heaviest_first = sorted(owned, key=lambda specs: -sum(matrix_cost(s.shape) for s in specs if len(s.shape) > 1))
    idlest_first = sorted(range(len(owned)), key=lambda rank: (work[rank], rank))
    share_of = dict(zip(idlest_first, heaviest_first, strict=True))
    return [share_of[rank] for rank in range(len(owned))]


def _length(specs: Sequence[TensorSpec]) -> int:
    return sum(aligned(spec.numel) for spec in specs)


def _longest(owned: Sequence[Sequence[TensorSpec]]) -> int:
    return max(map(_length, owned), default=0)
