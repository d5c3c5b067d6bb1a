"""A CPU that answers as late as a GPU: the host hears whether gradients were finite when it asks, not before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxshard.optim import verdict
from fxshard.optim.verdict import PendingVerdict, Verdicts


def _copy_to_host(self: Verdicts, names: Sequence[str], finite: torch.Tensor) -> None:
    arrived: Any = SimpleNamespace(query=lambda: True)
    self._pending = PendingVerdict(self._calls, names, finite.clone(), arrived)


@contextmanager
def known_late() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdict, "known_at_once", lambda device: False)
        patch.setattr(Verdicts, "_copy_to_host", _copy_to_host)
        yield
