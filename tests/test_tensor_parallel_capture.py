"""Tensor-parallel models in all the ways that models are captured: their losses and gradients are the plain model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fxshard
from tests.hugging_face import llama
from tests.parallel import Block, Model, batch, parallel
from tests.pool import Pool
from tests.thorough import thorough

Found = tuple[Any, dict[str, torch.Tensor], Any, dict[str, torch.Tensor]]
"""A loss and gradients, and what they should be."""


def compiled(mesh: DeviceMesh, model: nn.Module, **options: Any) -> fxshard.ShardedModule:
    return fxshard.compile(parallel(mesh, model), mesh=mesh["dp"], lowering="eager", **options)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole ones. There is one data-parallel rank here, so torch knows where all elements lie."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def loss_and_gradients(model: nn.Module, plain: nn.Module, call: Callable[..., Any] | None = None) -> Found:
    found = []
    for each, run in ((model, model if call is None else call), (plain, plain)):
        loss = run(*batch(0, 0))
        loss.backward()
        found += [float(loss.detach()), gradients(each)]
    return tuple(found)  # type: ignore[return-value]


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Deep(Model):
    def __init__(self, layers: int, kind: type[Block] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(layers))


class Logits(Model):
    """Returns logits, and has a method."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def folded(mesh: DeviceMesh) -> Found:
    model = compiled(mesh, Deep(7))
    found = loss_and_gradients(model, Deep(7))
    assert model.report.compilations.layers_folded == 2
    return found


def recomputed_and_made_on_the_meta_device(mesh: DeviceMesh) -> Found:
    """Two micro-batches, the first inside ``no_sync``, with an evaluation in between."""

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.2)

    with torch.device("meta"):
        model = Deep(1, Checkpointed)
    made, plain = compiled(mesh, model, init=init), Deep(1)
    values = made.full_state_dict()
    assert all(0.05 < float(value.std()) < 0.5 for name, value in values.items() if value.numel() > 100)
    plain.load_state_dict(values)
    with made.no_sync():
        made(*batch(0, 0)).backward()
    plain(*batch(0, 0)).backward()
    with torch.no_grad():
        assert torch.allclose(made(*batch(1, 0)), plain(*batch(1, 0)))
    return loss_and_gradients(made, plain)


def loss_over_parts_of_logits(mesh: DeviceMesh) -> Found:
    """Logits are returned as DTensors, and torch computes the loss of their parts."""
    made = parallelize_module(
        Logits(), mesh["tp"], {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    )
    model, plain = fxshard.compile(made, mesh=mesh["dp"], lowering="eager"), Logits()
    for size in (2, 3):  # the second shape opens the size of the batch
        x, y = (torch.cat([part, part, part])[:size] for part in batch(size, 0))
        for each in (model, plain):
            each.zero_grad()
        with loss_parallel():
            logits = model(x)
            assert logits.placements == (Shard(2),) and logits.shape == (size, 8, 24)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
        expected = F.cross_entropy(plain(x).flatten(0, 1), y.flatten())
        expected.backward()
    return float(loss.detach().full_tensor()), gradients(model), float(expected.detach()), gradients(plain)


class Counted(Model):
    """A buffer that is a DTensor, and is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x, y)


def a_buffer_and_the_backend_by_its_name(mesh: DeviceMesh) -> Found:
    made, plain = Counted(), Counted()
    made.calls = distribute_tensor(made.calls, mesh["tp"], [Replicate()])
    model = fxshard.shard(parallel(mesh, made), mesh=mesh["dp"], lowering="eager")
    call = torch.compile(model, backend="fxshard")
    found = loss_and_gradients(model, plain, call)
    state = model.full_state_dict()
    assert torch.equal(state["calls"], plain.calls)
    state["calls"] += 5
    model.load_state_dict(state)
    call(*batch(0, 0))
    assert model.full_state_dict()["calls"].tolist() == [7.0] * 3
    return found


def a_method(mesh: DeviceMesh) -> Found:
    model, plain = compiled(mesh, Logits()), Logits()
    with torch.no_grad():
        hidden, expected = model.hidden(batch(0, 0)[0]), plain.hidden(batch(0, 0)[0])
    return hidden.full_tensor(), {}, expected, {}


CASES = (recomputed_and_made_on_the_meta_device,)
MORE = (loss_over_parts_of_logits, a_buffer_and_the_backend_by_its_name, a_method, folded)


def run(cases: Sequence[Callable[[DeviceMesh], Found]]) -> dict[str, Found]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for case in cases:
        found[case.__name__] = case(mesh)
        torch._dynamo.reset()
    return found


@pytest.mark.shows("T1")
@pytest.mark.parametrize("cases", [CASES, thorough(MORE)], ids=["captured", "more"])
def test_losses_and_gradients_are_the_plain_models(ranks: Pool, cases: Sequence[Callable[[DeviceMesh], Found]]) -> None:
    for found in ranks(2, run, cases):
        assert len(found) == len(cases)
        for name, (loss, grads, expected, expected_grads) in found.items():
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6, msg=name)
            assert grads.keys() == expected_grads.keys()
            for parameter, gradient in expected_grads.items():
                torch.testing.assert_close(grads[parameter], gradient, rtol=1e-4, atol=1e-6, msg=f"{name}: {parameter}")


def in_bf16() -> tuple[float, float, set[torch.dtype]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    precision = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)
    model = compiled(mesh, Model(), precision=precision, optimizer=fxshard.AdamW())
    plain = Model()
    loss, grads, expected, expected_grads = loss_and_gradients(model, plain)
    off = max(float((grads[name] - grad).norm() / grad.norm()) for name, grad in expected_grads.items())
    return abs(loss - expected), off, {parameter.dtype for parameter in model._inner.parameters()}


@pytest.mark.thorough
def test_compute_in_bf16(ranks: Pool) -> None:
    for loss, gradient, dtypes in ranks(2, in_bf16):
        assert loss < 2e-2 and 1e-5 < gradient < 5e-2 and dtypes == {torch.bfloat16}


# -- transformers ------------------------------------------------------------------------------------------------------


def by_tp_plan() -> tuple[float, float, float]:
    """The plan that the class comes with, as ``from_pretrained(..., tp_plan="auto")`` applies it."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    made, plain = apply_tensor_parallelism(llama(), mesh["tp"]), llama()
    model = fxshard.compile(made, mesh=mesh["dp"], lowering="eager")
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for each in (model, plain):
        loss = each(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(float(loss.detach()))
    mine, theirs = gradients(model), gradients(plain)
    return *losses, max(float((mine[name] - grad).norm() / grad.norm()) for name, grad in theirs.items())  # type: ignore[return-value]


@pytest.mark.thorough
@pytest.mark.shows("T1")
def test_a_plan_of_transformers(ranks: Pool) -> None:
    for mine, theirs, off in ranks(2, by_tp_plan):
        assert mine == pytest.approx(theirs, rel=1e-6) and off < 1e-5
