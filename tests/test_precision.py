"""Mixed precision: fp32 masters, low-precision gathers and compute, reductions in the dtype asked for."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import fxshard
from fxshard.schedule.events import Kind
from tests.pool import Pool
from tests.thorough import thorough
from tests.toy import Llama, batch
from tests.training import Run, mean_over_ranks, train_step

BF16 = torch.bfloat16
VOCAB, STEPS = 32, 2


def llama() -> torch.nn.Module:
    """Small: CPUs without bf16 products take a thousand times longer for them than for those of fp32."""
    torch.manual_seed(0)
    return Llama(vocab=VOCAB, dim=16, layers=1, heads=2, hidden=24)


def this_ranks_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(step, dist.get_world_size(), dist.get_rank(), VOCAB, size=2, length=8)


def fsdp2(reduce: torch.dtype) -> Run:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce)
    model = llama()
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(STEPS):
        losses.append(mean_over_ranks(train_step(model, *this_ranks_batch(step), optimizer=optimizer)))
    return Run(losses, {}, {name: value.full_tensor() for name, value in model.state_dict().items()})


def ours(zero: int, reduce: torch.dtype) -> tuple[Run, set[torch.dtype], set[str]]:
    precision = fxshard.Precision(param=BF16, reduce=reduce)
    model = fxshard.compile(llama(), zero=zero, precision=precision, optimizer=fxshard.AdamW(lr=1e-3), lowering="eager")
    losses = []
    for step in range(STEPS):
        losses.append(mean_over_ranks(train_step(model, *this_ranks_batch(step))))
    masters = {parameter.dtype for parameter in model.parameters()}
    moved = {f"{e.kind} {e.dtype}" for e in model.schedule.events if e.kind in (Kind.UNSHARD, Kind.REDUCE)}
    return Run(losses, {}, model.full_state_dict()), masters, moved


def against_fsdp2(zero: int, reduce: torch.dtype) -> tuple[Run, Run, set[torch.dtype], set[str]]:
    return fsdp2(reduce), *ours(zero, reduce)


@pytest.mark.parametrize("reduce", [torch.float32, thorough(BF16)])
@pytest.mark.parametrize("zero", [thorough(0), 3])
def test_equals_fsdp2_with_the_same_policy(ranks: Pool, zero: int, reduce: torch.dtype) -> None:
    for peer, run, masters, moved in ranks(2, against_fsdp2, zero, reduce):
        assert run.distance(peer) < (1e-6 if reduce is torch.float32 else 1e-3)
        assert masters == {torch.float32}
        assert moved == {"unshard torch.bfloat16", f"reduce {reduce}"}


def test_float_inputs_are_cast() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    low = copy.deepcopy(plain).to(BF16)
    x = torch.randn(3, 8)
    model = fxshard.compile(plain, precision=fxshard.Precision(param=BF16), lowering="eager")
    torch.testing.assert_close(model(x), low(x.to(BF16)), rtol=0, atol=0)
    assert next(model.parameters()).dtype is torch.float32


def test_precision_refuses_integers() -> None:
    with pytest.raises(fxshard.ConfigError, match="floating-point"):
        fxshard.Precision(param=torch.int32)
