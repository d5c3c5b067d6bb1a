"""The benchmark's tensor-parallel contenders train the same model on the same batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxshard._torch.errors import ConfigError
from fxshard.bench.contenders import fsdp2_tensor_parallel, ours_tensor_parallel
from fxshard.bench.models import LlamaConfig
from fxshard.bench.tensor_parallel import PARTS, parallelize
from fxshard.bench.workloads import Size, Workload, loss_of
from tests.pool import Pool
from tests.thorough import thorough
from tests.training import train_step

SIZE = Size(LlamaConfig(vocab=64, dim=32, layers=1, heads=4, hidden=48), 2, 8)


def losses() -> tuple[list[list[float]], list[torch.Tensor]]:
    workload, device = Workload("small", size=SIZE, sharing=PARTS), torch.device("cpu")
    found = []
    for contender in (
        lambda model: fsdp2_tensor_parallel(model, None, compiled=False),
        lambda model: ours_tensor_parallel(model, None, lowering="eager"),
    ):
        plain, inputs = workload.build(device)
        model, optimizer = contender(plain)
        run = []
        for _ in range(2):
            run.append(float(train_step(loss_of, model, inputs, optimizer=optimizer)))
        found.append(run)
    return found, list(inputs)


@pytest.mark.thorough
@pytest.mark.shows("T1")
@pytest.mark.parametrize("world", [PARTS, thorough(2 * PARTS)])
def test_both_have_the_same_losses(ranks: Pool, world: int) -> None:
    found = ranks(world, losses)
    for (theirs, mine), _ in found:
        assert mine == pytest.approx(theirs, rel=1e-6)
    batches = [tokens for _, (tokens, _) in found]
    assert torch.equal(batches[0], batches[1]) and not any(torch.equal(batches[0], other) for other in batches[PARTS:])


def test_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tensor-parallel plan for Linear"):
        parallelize(nn.Linear(2, 2))
