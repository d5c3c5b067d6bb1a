"""Stages of ``torch.distributed.pipelining`` that fxshard shards: they train as the whole model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fxshard
from fxshard.integrations.pipelining import PipelineStage
from tests.pipeline import DIM, LENGTH, MICRO, STEPS, VOCAB, data, in_one_process, loss_of, parts, pipelined
from tests.pool import Pool
from tests.thorough import thorough

SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
LR, EPS = 1e-2, 1e-4
ADAMW = fxshard.AdamW(lr=LR, eps=EPS)


def torch_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, eps=EPS, fused=True)


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "pp"))


def ours(kind: str, stage: str = "once", zero: int = 3, per_rank: int = 1) -> dict[str, Any]:
    mesh, made = mesh_of(), []

    def make(part: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fxshard.compile(part, mesh=mesh["dp"], zero=zero, optimizer=ADAMW, lowering="eager")
        made.append(model)
        return model, model.optimizer

    chosen = PipelineStage if stage == "once" else pipelining.PipelineStage
    found = pipelined(mesh, make, chosen, SCHEDULES[kind], per_rank)
    return {**found, "buckets": sum(len(model.schedule.buckets) for model in made)}


def theirs(kind: str) -> dict[str, Any]:
    """FSDP2 in each stage."""
    mesh = mesh_of()

    def make(part: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        for layer in part.get_submodule("layers"):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(part, mesh=mesh["dp"])
        return part, torch_adamw(part.parameters())

    return pipelined(mesh, make, pipelining.PipelineStage, SCHEDULES[kind])


def compare(found: list[dict[str, Any]], replicas: int, stages: int = 2) -> None:
    """With plain PyTorch on the global batch, in one process."""
    wanted = in_one_process(replicas, torch_adamw, stages)
    seen: set[str] = set()
    for rank, run in enumerate(found):
        if rank % 2 == 1:  # the last stage has the losses
            torch.testing.assert_close(torch.tensor(run["losses"]), torch.tensor(wanted["losses"][rank // 2]))
        for mine, plain in zip(run["grads"], wanted["grads"], strict=True):
            torch.testing.assert_close(mine, {name: plain[name] for name in mine}, rtol=1e-4, atol=1e-7)
            seen |= set(mine)
    assert seen == set(wanted["grads"][0]) and len(found[0]["grads"]) == STEPS


@pytest.mark.parametrize("stage", [thorough("once"), "each"])
@pytest.mark.parametrize("kind", [thorough("GPipe"), "1F1B"])
def test_two_stages_train_as_one_process_does(kind: str, stage: str, ranks: Pool) -> None:
    """With up to four forwards ahead of their backwards."""
    compare(ranks(2, ours, kind, stage), 1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stage", "zero"), [("once", 3), thorough("once", 1), thorough("each", 3), thorough("each", 2)]
)
def test_two_stages_of_two_replicas(stage: str, zero: int, ranks: Pool) -> None:
    """As plain PyTorch on the global batch; reduced once, bit by bit as FSDP2 in the same pipeline."""
    found = ranks(4, ours, "1F1B", stage, zero)
    compare(found, 2)
    if (stage, zero) == ("once", 3):
        for run in found:
            each = run["calls"]["all_gather"] / run["buckets"]
            assert STEPS * MICRO <= each <= 2 * STEPS * MICRO, "for each micro-batch, in forward or also in backward"
        for mine, other in zip(found, ranks(4, theirs, "1F1B"), strict=True):
            assert mine["losses"] == other["losses"]
            for grads, wanted in zip(mine["grads"], other["grads"], strict=True):
                assert grads.keys() == wanted.keys() and all(torch.equal(grads[n], wanted[n]) for n in wanted)
    for run in found:
        backwards = 1 if stage == "once" else MICRO
        if zero > 1:
            assert run["calls"]["reduce_scatter"] == STEPS * backwards * run["buckets"]


@pytest.mark.thorough
def test_parameters_are_gathered_once_per_step_where_they_stay(ranks: Pool) -> None:
    for run in ranks(4, ours, "1F1B", "once", 2):
        assert run["calls"]["all_gather"] == STEPS * run["buckets"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [thorough("interleaved"), "zero bubble"])
def test_several_stages_on_a_rank(kind: str, ranks: Pool) -> None:
    """Also where a schedule wants gradients of inputs first: those of weights come with them."""
    compare(ranks(2, ours, kind, "once", 3, 2), 1, stages=4)


def clipped_and_resumed(folder: str) -> dict[str, Any]:
    """A step with clipping over all stages; a checkpoint of each stage, loaded by another pipeline."""
    mesh = mesh_of()
    number = mesh.get_local_rank("pp")

    def made() -> fxshard.ShardedModule:
        return fxshard.compile(parts()[number], mesh=mesh["dp"], optimizer=ADAMW, lowering="eager")

    def train(model: fxshard.ShardedModule, steps: range) -> float:
        stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = ScheduleGPipe(stage, MICRO, loss_fn=loss_of)
        for step in steps:
            x, y = data(step, mesh.get_local_rank("dp"))
            schedule.step(*([x] if number == 0 else []), target=y if number == 1 else None)
            square = model.norms()[""] ** 2
            dist.all_reduce(square, group=mesh.get_group("pp"))
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, square.sqrt())
            model.optimizer.step()
            model.optimizer.zero_grad()
        return float(square.sqrt())

    straight, again = made(), made()
    norm = train(straight, range(1))
    params = straight.full_state_dict()
    fxshard.save(straight, Path(folder, f"stage-{number}"))
    fxshard.load(again, Path(folder, f"stage-{number}"))
    for model in (straight, again):
        train(model, range(1, 3))
    resumed, wanted = again.full_state_dict(), straight.full_state_dict()
    same = [torch.equal(resumed[name], value) for name, value in wanted.items()]
    return {"norm": norm, "params": params, "same": same}


def test_clipping_over_stages_and_a_checkpoint_of_each(ranks: Pool, tmp_path: Path) -> None:
    plain = nn.Sequential(*parts())
    optimizer = torch_adamw(plain.parameters())
    x, y = data(0, 0)
    loss_of(plain(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    optimizer.step()
    for rank, found in enumerate(ranks(2, clipped_and_resumed, str(tmp_path))):
        assert found["norm"] == pytest.approx(float(norm), rel=1e-5) and float(norm) > 0.1
        torch.testing.assert_close(found["params"], dict(plain[rank].state_dict()), rtol=1e-4, atol=1e-6)
        assert found["same"] and all(found["same"])


def compiled_by_torch() -> dict[str, Any]:
    """``torch.compile`` around ``fxshard.shard``, sizes of the stages given."""
    mesh = mesh_of()

    def make(part: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fxshard.shard(part, mesh=mesh["dp"], optimizer=ADAMW, lowering="eager")
        return torch.compile(model, backend="fxshard"), model.optimizer  # type: ignore[return-value]

    def stage(model: nn.Module, number: int, *args: Any, **kwargs: Any) -> PipelineStage:
        tokens, hidden = torch.zeros(2, LENGTH, dtype=torch.int64), torch.zeros(2, LENGTH, DIM, requires_grad=True)
        logits = torch.zeros(2, LENGTH, VOCAB, requires_grad=True)
        sizes = (tokens, hidden) if number == 0 else (hidden, logits)
        return PipelineStage(model, number, *args, **kwargs, input_args=sizes[0], output_args=sizes[1])

    return pipelined(mesh, make, stage, Schedule1F1B)


@pytest.mark.thorough
def test_torch_compile_around_a_sharded_stage(ranks: Pool) -> None:
    compare(ranks(2, compiled_by_torch), 1)


def refused() -> list[str]:
    said = []
    for module, options in ((nn.Linear(2, 2), {}), (nn.Linear(2, 2), {"dw_builder": lambda: None})):
        with pytest.raises(fxshard.ConfigError) as error:
            PipelineStage(module, 0, 1, torch.device("cpu"), **options)
        said.append(str(error.value))
    return said


def test_what_a_stage_refuses() -> None:
    plain, weights = refused()
    assert "this is a Linear" in plain and "dw_builder" in weights


def tensor_parallel_stages() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "pp", "tp"))

    def make(part: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        styles = {"layers.*": ColwiseParallel(output_layouts=Replicate())}
        model = fxshard.compile(
            parallelize_module(part, mesh["tp"], styles), mesh=mesh["dp"], optimizer=ADAMW, lowering="eager"
        )
        return model, model.optimizer

    return pipelined(mesh["dp", "pp"], make, PipelineStage, Schedule1F1B)


@pytest.mark.thorough
def test_tensor_parallel_stages(ranks: Pool) -> None:
    first, _, last, _ = ranks(4, tensor_parallel_stages)
    compare([first, last], 1)
