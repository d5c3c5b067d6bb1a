"""Whether the gradients of a step are finite: decided on their device, read by the host when it does not have to wait.

On a GPU the host is ahead of the device, and reading a number there would make it wait in every step. So the step is
made at once, by kernels that read the verdict and write nothing if the gradients are not finite. The host reads it when
the next step begins, or when the state is read: on all ranks at the same place, because a rank that stopped as soon as
it knew would leave the others in a collective. On the CPU the verdict is known at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxshard._torch.errors import StateError


def known_at_once(device: torch.device) -> bool:
    """Whether the host may look at a number there without waiting for what was launched before."""
    return device.type != "cuda"


@dataclass(frozen=True)
class PendingVerdict:
    """A verdict that is being copied to the host: for each gradient, and for all of them on all ranks."""

    call: int
    names: Sequence[str]
    finite: torch.Tensor
    arrived: torch.cuda.Event


class Verdicts:
    """Judges the gradients of every step of one optimizer."""

    def __init__(self, mode: str, optimizer: str) -> None:
        self._mode, self._optimizer, self._calls = mode, optimizer, 0
        self._pending: PendingVerdict | None = None
        self.left_out = 0
        """How many steps were not made, as far as the host knows."""
        self.refused: torch.Tensor | None = None
        """A number for kernels to read: 1.0 if the step must not be made, else 0.0. None where the host knows."""
        self.allowed: torch.Tensor | None = None
        """The opposite."""

    def may_step(self, names: Sequence[str], finite: torch.Tensor, everywhere: torch.Tensor) -> bool:
        """Whether to go on, given what is finite here and whether all is everywhere; raises if that is known and so
        configured. What was unknown of an earlier step has been settled before.
        """
        assert self._pending is None
        self._calls += 1
        self.refused = self.allowed = None
        if not known_at_once(everywhere.device):
            self.allowed = everywhere.float()
            self.refused = 1 - self.allowed
            self._copy_to_host(names, torch.cat([finite, everywhere.view(1)]))
            return True
        if bool(everywhere):
            return True
        self.left_out += 1
        found = f"gradients are not finite: {_listed(names, finite.tolist())}"
        if self._mode == "raise":
            raise StateError(f"{found}. Nothing was changed: neither parameters nor state. {self._what_to_do}")
        warnings.warn(f"step skipped, {found}; parameters and state are as before", RuntimeWarning, stacklevel=3)
        return False

    def settle(self, take_back: Callable[[], None] | None = None, *, may_raise: bool = True) -> None:
        """Say what is still to be said about the last step: raise, or warn that it was skipped, as configured.

        ``take_back`` is called first if it was not made, to undo what the host did for it.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if not pending.arrived.query():  # of a step ago: almost always there
            pending.arrived.synchronize()  # what the device was given since then is not waited for
        *finite, everywhere = pending.finite.tolist()
        if everywhere:
            return
        self.left_out += 1
        if take_back is not None:
            take_back()
        found = f"gradients were not finite in call {pending.call} of step(): {_listed(pending.names, finite)}"
        if self._mode == "raise" and may_raise:
            raise StateError(
                f"{found}. That step changed nothing, neither parameters nor state, and no step was made since: on "
                f"a GPU this is known when the next step begins or the state is read. {self._what_to_do}"
            )
        warnings.warn(f"{found}; that step was skipped and changed nothing", RuntimeWarning, stacklevel=4)

    @property
    def _what_to_do(self) -> str:
        return (
            "Find the cause (a loss that overflows, a learning rate too high), or pass "
            f'fxshard.{self._optimizer}(nan="skip") to leave such steps out with a warning'
        )

    def _copy_to_host(self, names: Sequence[str], finite: torch.Tensor) -> None:
        here = torch.empty(finite.shape, dtype=finite.dtype, pin_memory=True)
        here.copy_(finite, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(finite.device))
        self._pending = PendingVerdict(self._calls, names, here, arrived)


def _listed(names: Sequence[str], finite: Sequence[bool], most: int = 5) -> str:
    bad = [name for name, fine in zip(names, finite, strict=True) if not fine] or ["those of another rank"]
    return ", ".join(bad[:most]) + (f" and {len(bad) - most} more" if bad[most:] else "")
