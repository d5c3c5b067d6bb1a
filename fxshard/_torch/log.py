"""The logger ``fxshard``: warnings only, unless ``FXSHARD_LOG=info`` or ``debug`` asks for more.

``info`` tells what is captured, what each pass does and what is decided, on rank 0. ``debug`` adds every segment that
is compiled, on every rank. Programs that set up logging themselves get the same from ``logging.getLogger("fxshard")``.
"""

from __future__ import annotations

import logging
import os
import sys

VARIABLE = "FXSHARD_LOG"
LEVELS = {"info": logging.INFO, "debug": logging.DEBUG, "warning": logging.WARNING}

LOG = logging.getLogger("fxshard")


def rank() -> int:
    """This process among those that train together; 0 where it is alone. Does not import torch."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """To stderr, with the rank. Below WARNING only rank 0 writes, except at level DEBUG."""

    def emit(self, record: logging.LogRecord) -> None:
        record.__dict__["rank"] = here = rank()
        if here == 0 or record.levelno >= logging.WARNING or LOG.level == logging.DEBUG:
            super().emit(record)


def set_up() -> None:
    """Follow the environment, when fxshard is imported."""
    asked = os.environ.get(VARIABLE, "").lower()
    if not asked:
        return
    if asked not in LEVELS:
        LOG.warning("%s=%s: expected one of %s; staying quiet", VARIABLE, asked, ", ".join(LEVELS))
        return
    handler = _Handler()
    handler.setFormatter(logging.Formatter("[fxshard %(rank)s %(asctime)s] %(message)s", "%H:%M:%S"))
    LOG.addHandler(handler)
    LOG.setLevel(LEVELS[asked])
    LOG.propagate = False
