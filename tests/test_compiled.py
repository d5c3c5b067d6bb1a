"""A model dies when it is dropped: not later, inside a collective, where its death would stop another thread's."""

import gc
import threading
import time
import types
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.convert_frame import output_codes

import fxshard
from tests.pool import RECORDED, Pool, forget


def train() -> weakref.ref[object]:
    model = fxshard.compile(torch.nn.Linear(4, 4), zero=3, optimizer=fxshard.AdamW(lr=1e-2), lowering="eager")
    model(torch.ones(2, 4)).sum().backward()
    model.optimizer.step()
    return weakref.ref(model._sharding)


def test_dropped_model_frees_its_shards() -> None:
    """Without ``torch._dynamo.reset()``, which would forget the models of everybody else."""
    sharding = train()
    gc.collect()
    assert sharding() is None


def sleep_at_death(code: Callable[[], types.CodeType | None]) -> None:
    """What Dynamo does when its code dies may let go of the GIL: destructors of process groups do. Here it does."""
    weakref.finalize(code(), time.sleep, 0.5).atexit = False


def communicate(group: dist.ProcessGroup | None) -> None:
    for _ in range(RECORDED):
        dist.all_reduce(torch.ones(1), group=group)


def drop_then_communicate() -> bool:
    """Whether a model that was dropped is gone; afterwards two threads make the recorder forget its collectives."""
    sharding = train()
    for code in output_codes.seen:
        sleep_at_death(code)
    forget()
    gc.collect()
    gone = sharding() is None
    beside = threading.Thread(target=communicate, args=(dist.new_group(),), daemon=True)
    beside.start()
    communicate(None)
    beside.join()
    return gone


def test_dropped_model_is_gone_before_the_recorder_forgets_it(ranks: Pool) -> None:
    assert ranks(2, drop_then_communicate, timeout=40) == [True, True]


def emptied() -> str:
    compiled = fxshard.compile(torch.nn.Linear(4, 4), zero=3, lowering="eager")
    compiled(torch.ones(2, 4))
    compiled._backend.compiled.empty()
    with pytest.raises(fxshard._torch.errors.StateError) as caught:
        compiled(torch.ones(2, 4))
    return str(caught.value)


def test_code_of_a_dead_model_says_so(ranks: Pool) -> None:
    assert "does not exist any more" in ranks(2, emptied)[0]
