"""Muon on a tensor-parallel model: how its matrices lie on data-parallel ranks, and what is planned for that."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import fxshard
from tests.parallel import cut_wide
from tests.stack import wide, wide_batch

WAYS: dict[str, dict[str, Any]] = {
    "rows": {"zero": 3, "layout": "rows", "units": ["net", "net.2"]},
    "whole": {"zero": 1, "layout": "whole"},
    "everywhere": {"zero": 0},
}
"""One matrix goes to a data-parallel rank before its parts do; all are on a rank each; all are on all."""
EAGER: dict[str, Any] = {"optimizer": fxshard.Muon(lr=2e-2), "lowering": "eager"}


def planned(way: str) -> str:
    """The schedule for 2 × 2 ranks, on a CPU. It makes torch's fake process group: on a rank that leaves its own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    about: dict[str, Any] = {"mesh": {"dp": 2, "tp": 2}, "parallelize": cut_wide, "hardware": "cpu", **EAGER}
    return fxshard.plan(wide(), wide_batch(0, 0), **about, **WAYS[way]).to_json()
