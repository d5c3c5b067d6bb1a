"""What a launcher sets up for tools that ask the environment, and data to train on in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.hugging_face import SMALL, llama

__all__ = ["VOCAB", "launched", "llama", "rows", "with_fsdp2"]

VOCAB: int = SMALL["vocab_size"]


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """This rank as ``torchrun`` starts it; what Accelerate remembers of it is gone after."""
    from accelerate.state import AcceleratorState, GradientState

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    environment = {
        "RANK": rank,
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", rank),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # asked for, and not used: there is a process group
        "OMP_NUM_THREADS": "1",
    }
    with mock.patch.dict(os.environ, environment):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def with_fsdp2(trainer: type) -> type:
    """A ``Trainer`` that uses Accelerate's FSDP2 on a CPU as well.

    Accelerate takes ``fsdp=True`` on accelerators only, and trains with DDP on CPUs without a word.
    """

    class WithFSDP2(trainer):  # type: ignore[misc, valid-type]
        def create_accelerator_and_postprocess(self) -> None:
            from accelerate import DistributedType, FullyShardedDataParallelPlugin

            super().create_accelerator_and_postprocess()
            state: Any = self.accelerator.state
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    return WithFSDP2


def rows(count: int, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """A data set: each row is drawn by its number."""
    found = []
    for i in range(count):
        tokens = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(i))
        found.append({"input_ids": tokens, "labels": tokens})
    return found
