"""Numbers that were chosen, not derived: what each does, and what it was measured on.

Figures of machines are in :mod:`fxshard.planner.hardware`; numbers that follow from a format or a formula stand where
they are used. "Simulated" figures are those of ``docs/planning-figures.md``.
"""

from __future__ import annotations

FARTHEST = 2
"""Gathers that may run ahead of forward if durations ask for it; more do where there is room for them anyway.

Not measured; why it is not another number is not recorded."""

FARTHEST_IN_BACKWARD = 1
"""The same for backward, where gathers take turns with reductions: a second one would hold up a reduction that memory
waits for.

Simulated for what ``fill_arena`` moves: llama-8b on gb200 with 64 ranks takes 120.5 ms where gathers go ahead of
reductions, and 118.4 ms where they do not."""

MARGIN = 1.25
"""Estimates of how long a gather takes are stretched by this: one that starts a little early costs little, a late one
stalls compute.

Not measured; why it is a quarter is not recorded."""

PLAINLY_LEADING = 2
"""Gathers that start with forward whatever room there is; ``fill_arena`` finds places for others among them.

Not measured on its own; why it is not another number is not recorded."""

LEADING = 8
"""Gathers that forward starts with at most, if there is room for them. An optimizer step starts these early.

Simulated on moe-16b with 8 ranks: the three rows take 346.8, 334.6 and 170.1 ms with two, and 335.1, 323.6 and 164.2 ms
with those for which there is room. The two Llamas do not change. That eight is the right limit was not measured."""

MORE = 1
"""Gathers for which ``fill_arena`` may add room where most are late, without a memory budget.

Not measured on its own; simulated on moe-16b, h200, 8 ranks, all that ``fill_arena`` does together: 337.4 ms without
it and 323.6 ms with it."""

MORE_IN_BUDGET = 8
"""The same within a memory budget, which says how much memory there is.

Not measured on its own; as above under a roomy budget: 270.0 ms without ``fill_arena`` and 259.0 ms with it."""

GRADIENT_BUCKETS = 2
"""Full gradient buckets that may be alive at once: the one being filled and the one being reduced.

Not measured; chosen because the acceptance list allows no more (S5)."""

LARGEST_SHARE = 4
"""A bucket spans at most this fraction of the units: nothing hides the reduction of the last one, and under ZeRO-2 its
full gradients take room in the arena.

Not measured; why it is a quarter is not recorded."""

MOST_PADDING = 0.02
"""Of whole layouts over several layers: the share of padding up to which they are chosen without comparing bytes.

Not measured; the acceptance list says so (X1)."""

DEALT_SHARE = 0.75
"""Matrices of several layers become a bucket when they are this share of an average unit: on two ranks, six matrices of
the seven of a layer.

Simulated on a Llama of 16 layers (dimension 1024) with Muon, h200, 8 ranks: steps of ZeRO-1 and 2 take 26.07 and 26.71
ms with a half, 26.10 and 26.10 ms with this or one."""

FIRST_DEALT_SHARE = 0.5
"""The same for the first bucket of forward: backward ends with its reduction, which nothing is left to hide, and
forward begins with its gather.

Simulated on Llamas of 16 layers with Muon, h200, 8 ranks, ZeRO-1 and 2 alike: 156.5 ms with this, 157.8 with 0.75
(dimension 2048), and 55.8 against 56.1 (dimension 1024)."""

MOST_WHOLE = 2.5
"""How many times as long as with rows buckets may be where whole layouts are asked for.

Not measured; chosen so that a mistake of 230 % is an error."""

BATCH_BYTES = 2**29
"""Bytes that a rank receives at most at a time when matrices travel to their owners, unless a single one is larger.

Not measured; why it is half a GiB is not recorded."""

LOGITS_OF_A_CHUNK = 2**29
"""Bytes of logits that exist at a time where a loss is computed in chunks. The gradient of the head's weight is read
and written once per chunk, in fp32: small chunks would spend more time on that than on products."""


def rows_of_a_chunk(classes: int, itemsize: int) -> int:
    """How many tokens' logits fit into ``LOGITS_OF_A_CHUNK``: a multiple of 128, as products like it."""
    return max(128, LOGITS_OF_A_CHUNK // (classes * itemsize) // 128 * 128)
