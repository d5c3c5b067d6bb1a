"""The largest logits of attention since the last optimizer step, of all micro-batches of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxshard._torch.errors import StateError
from fxshard.planner.head_rows import AttentionHeads


class LargestLogits:
    """What forward measured, until an optimizer takes it."""

    def __init__(self) -> None:
        self.heads: tuple[AttentionHeads, ...] = ()
        """The attentions of the model, as they follow each other in what was measured."""
        self._largest: torch.Tensor | None = None

    def noting(self, heads: Sequence[AttentionHeads], run: Callable[..., Any]) -> Callable[..., Any]:
        """``run`` without its last result, the largest logits of ``heads``, which are noted."""
        if self.heads and tuple(heads) != self.heads:
            raise StateError(
                f"qk_clip: this forward computes attention at {', '.join(each.where for each in heads)}, an earlier "
                f"one at {', '.join(each.where for each in self.heads)}: leave out qk_clip for a model that chooses "
                "its layers as it runs"
            )
        self.heads = tuple(heads)

        def call(*args: Any) -> list[Any]:
            *results, largest = run(*args)
            if self._largest is None:
                self._largest = largest.clone()  # a replayed program writes to the same place again
            else:
                torch.maximum(self._largest, largest, out=self._largest)
            return results

        return call

    def take(self) -> torch.Tensor | None:
        """Those of this step; the next begins without any. None: there was no forward."""
        largest, self._largest = self._largest, None
        return largest
