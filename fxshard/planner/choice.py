"""Choose the layout of a bucket, and how many units share one.

Muon needs whole matrices. A whole layout hands them to their owners for nothing, but pads where there are too few equal
matrices for the ranks; a row layout pads little, but matrices that cross a shard boundary travel to an owner and back
in every step. Both prices are bytes on the wire, so they can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from fxshard.planner.layout import Layout, TensorSpec
from fxshard.planner.rows import row_layout
from fxshard.planner.units import Unit
from fxshard.planner.whole import whole_layout

LayoutKind = Literal["auto", "rows", "whole"]
LAYOUTS: tuple[LayoutKind, ...] = ("auto", "rows", "whole")

THERE_AND_BACK = 4 + 2
"""Bytes an element of a travelling matrix costs: fp32 to its owner, the bf16 direction back."""


@dataclass(frozen=True)
class Chosen:
    """A layout, and the reason for it."""

    layout: Layout
    why: str


def choose_layout(
    specs: Sequence[TensorSpec],
    ranks: int,
    wanted: LayoutKind = "auto",
    *,
    matrices: Collection[str] = (),
    work: Sequence[float] = (),
    bytes_moved: int = 8,
    dealt: bool = False,
) -> Chosen:
    """The layout of one bucket over ``ranks``; ``bytes_moved`` is what gathers and reductions move per element.

    ``dealt``: the matrices were chosen so that whole layouts hardly pad.
    """
    muon = [spec for spec in specs if spec.name in matrices]
    if ranks == 1:
        return Chosen(row_layout(specs, 1), "on every rank")
    if wanted == "rows" or (wanted == "auto" and not muon):
        return Chosen(row_layout(specs, ranks), "asked for" if wanted == "rows" else "no matrix for Muon")
    whole = whole_layout(specs, ranks, work)
    share = 100 * whole.padding / max(1, whole.numel)
    if wanted == "whole":
        return Chosen(whole, "asked for")
    if dealt:
        return Chosen(whole, f"owners hold whole matrices, {share:.0f} % padding")
    rows = row_layout(specs, ranks)
    padded = (whole.padding - rows.padding) * bytes_moved
    exchanged = sum(spec.numel for spec in muon if crosses(rows, spec)) * THERE_AND_BACK // ranks
    if padded <= exchanged:
        return Chosen(whole, f"owners hold whole matrices, {share:.0f} % padding")
    return Chosen(rows, f"whole matrices would be {share:.0f} % padding, an exchange moves less")


def crosses(layout: Layout, spec: TensorSpec) -> bool:
    """Whether a matrix lies on several ranks. A stack of matrices is cut between them, so none of them does."""
    if len(spec.shape) != 2 or layout.ranks == 1 or not spec.numel:
        return False
    slot = layout.slots[layout.index[spec.name]]
    return slot.offset // layout.shard_numel != (slot.end - 1) // layout.shard_numel


def span_units(
    units: Sequence[Unit],
    specs_of: Callable[[Unit], Sequence[TensorSpec]],
    ranks: int,
    matrices: Collection[str],
    *,
    longest: int,
) -> list[Unit]:
    """Units with matrices, joined by as many as it takes until whole layouts cost less than exchanges, up to a length.

    For ZeRO-1 and 2, where nothing is gathered just in time. Seven matrices of a dense layer do not fill eight ranks;
    those of eight layers do. Where no length helps, units stay as they are.
    """
    if ranks == 1:
        return list(units)
    for length in range(1, longest + 1):
        joined = _joined(units, matrices, length)
        chosen = [
            choose_layout(specs_of(unit), ranks, matrices=matrices) for unit in joined if _has_matrix(unit, matrices)
        ]
        if chosen and all(choice.layout.whole for choice in chosen):
            return joined
    return list(units)


def _joined(units: Sequence[Unit], matrices: Collection[str], length: int) -> list[Unit]:
    """Stretches of units that have matrices, cut into pieces of ``length``; what is left over joins the last piece."""
    joined: list[Unit] = []
    for has_matrix, group in groupby(units, key=lambda unit: _has_matrix(unit, matrices)):
        stretch = list(group)
        if not has_matrix:
            joined += stretch
            continue
        pieces = max(1, len(stretch) // length)
        for i in range(pieces):
            piece = stretch[i * length : (i + 1) * length if i < pieces - 1 else None]
            name = piece[0].name if len(piece) == 1 else f"{piece[0].name}…{piece[-1].name}"
            joined.append(Unit(name, tuple(param for unit in piece for param in unit.params)))
    return joined


def _has_matrix(unit: Unit, matrices: Collection[str]) -> bool:
    return any(name in matrices for name in unit.params)
