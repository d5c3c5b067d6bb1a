"""Which ranks are missing when a collective failed: those that do not answer in the store all processes share.

The collective itself cannot say: gloo reports that time is up, not for whom it waited, and its connections are closed
by then. So every rank whose collective failed leaves a word in the store. A rank that was stopped, has ended, or never
came (``if rank == 0: fxshard.save(...)``) does not.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from fxshard._torch import private

SECONDS = 5.0
"""How long to wait for answers, where the timeout of the process group is not short itself."""

_MADE: Counter[tuple[int, ...]] = Counter()


class RollCall:
    """The ranks of one model. ``number`` counts what they have done together, so that all ask about the same."""

    def __init__(self, members: Sequence[int], timeout: datetime.timedelta) -> None:
        self._members, self._timeout = tuple(members), timeout
        self._patience = min(SECONDS, timeout.total_seconds() / 8)
        _MADE[self._members] += 1
        self._about = f"fxshard/roll call/{self._members[0]}+{len(self._members)}/{_MADE[self._members]}"
        self.number = 0

    @property
    def collectives(self) -> datetime.timedelta:
        """The timeout of a collective, after which there is still time to ask who is missing."""
        return self._timeout - datetime.timedelta(seconds=2 * self._patience)

    def explain(self, error: RuntimeError) -> str:
        """What to say of a collective that failed."""
        absent = self._absent()
        if absent is None:
            return (
                "other ranks did not come, and the store of the process group does not answer: the process that holds "
                f"it (rank 0, unless torchrun started the ranks) has ended or was stopped ({error})"
            )
        if not absent:
            return f"all ranks are there, but their communication failed ({error})"
        names = ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent))
        return (
            f"{names} did not come within the timeout of the process group ({self._timeout.total_seconds():g} s), or "
            f"ended: every rank has to make this call, not only some ({error})"
        )

    def _absent(self) -> list[int] | None:
        """The ranks that do not answer; None if the store does not."""
        answer: list[list[int]] = []
        # A store whose process was stopped never answers, and has no timeout for that.
        asking = threading.Thread(target=self._ask, args=(private.default_store(), answer), daemon=True)
        asking.start()
        asking.join(1.5 * self._patience)
        return answer[0] if answer else None

    def _ask(self, store: dist.Store, answer: list[list[int]]) -> None:
        about, until = f"{self._about}/{self.number}", time.monotonic() + self._patience
        try:
            store.set(f"{about}/{dist.get_rank()}", "here")
            while True:
                absent = [rank for rank in self._members if not store.check([f"{about}/{rank}"])]
                if not absent or time.monotonic() > until:
                    answer.append(absent)
                    return
                time.sleep(0.05)
        except RuntimeError:  # the store is gone, too
            return
