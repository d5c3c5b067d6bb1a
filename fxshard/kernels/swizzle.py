"""Scales in the order that block-scaled matrix products read them.

A tile of 128 rows × 4 scales becomes 512 bytes, ``(y % 32)·16 + (y / 32)·4 + x`` for the scale at ``(y, x)``; tiles
follow each other row by row. The form exists next to the product only: what is stored and sent is compact.
"""

from __future__ import annotations

import torch

TILE_ROWS, TILE_COLUMNS = 128, 4


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Compact scales ``[rows, blocks]`` as a flat swizzled tensor; both dimensions are padded with zeros to tiles."""
    rows, blocks = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -blocks % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    tiles = padded.view(padded.shape[0] // TILE_ROWS, 4, 32, padded.shape[1] // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
