"""Sequences cut over ranks: losses and gradients are those of plain PyTorch on whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import fxshard
from fxshard.integrations.context_parallel import ContextParallel, use_in
from fxshard.schedule.events import Kind, Phase
from tests.hugging_face import llama
from tests.pool import Pool
from tests.thorough import thorough
from tests.training import EPS, full_gradients

VOCAB, DIM, HEADS, LENGTH, STEPS = 16, 16, 4, 16, 2


class Layer(nn.Module):
    """Attention with two heads of keys for four of queries."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.context: ContextParallel | None = None
        self.q, self.k, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM // 2), nn.Linear(DIM, DIM // 2)
        self.o = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(2, (-1, DIM // HEADS)).transpose(1, 2) for project in (self.q, self.k, self.v))
        attend = F.scaled_dot_product_attention if self.context is None else self.context.attention
        return x + self.o(attend(q, k, v, is_causal=self.causal, enable_gqa=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList([Layer(causal)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.place(positions)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The model with attention over the context-parallel ranks of a mesh."""
    for layer in model.get_submodule("layers").children():
        layer.context = ContextParallel(mesh["cp"])  # type: ignore[assignment]
    return model


def batch(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8 * step + replica)
    x, y = torch.randint(VOCAB, (2, 2, LENGTH), generator=generator)
    return x, y


def meshes(parts: int) -> tuple[DeviceMesh, DeviceMesh]:
    """All ranks, and the same in one dimension, over which parameters are sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // parts, parts), mesh_dim_names=("dp", "cp"))
    return mesh, mesh._flatten("dp_cp")


def trained(parts: int, zero: int, causal: bool) -> dict[str, Any]:
    """What a run leaves on this rank; on the first one also the plan that is made of it without the others."""
    mesh, flat = meshes(parts)
    context = ContextParallel(mesh["cp"])
    options: Any = {"zero": zero, "optimizer": fxshard.AdamW(lr=1e-2, eps=EPS), "lowering": "eager"}
    model = fxshard.compile(cut(Model(causal), mesh), mesh=flat, **options)
    losses = []
    for step in range(STEPS):
        x, y = context.shard(*batch(step, mesh.get_local_rank("dp")))
        loss = model(x, y, context.positions(LENGTH))
        loss.backward()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
        if step < STEPS - 1:
            model.optimizer.step()
            model.optimizer.zero_grad()
    found = {"losses": losses, "grads": full_gradients(model), "schedule": model.schedule}
    inputs, first = (x, y, context.positions(LENGTH)), dist.get_rank() == 0
    shape = {"dp": mesh.shape[0], "cp": mesh.shape[1]}
    dist.barrier()
    dist.destroy_process_group()  # planning makes a fake one
    if first:
        found["plan"] = fxshard.plan(Model(causal), inputs, mesh=shape, parallelize=cut, hardware="cpu", **options)
    return found


def reference(replicas: int, causal: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain PyTorch in one process, on the whole sequences of all replicas."""
    model = Model(causal)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, fused=True)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (torch.cat(parts) for parts in zip(*(batch(step, i) for i in range(replicas)), strict=True))
        loss = model(x, y, torch.arange(LENGTH).unsqueeze(0))
        loss.backward()
        losses.append(float(loss.detach()))
        if step < STEPS - 1:
            optimizer.step()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("ranks_", "parts", "zero", "causal"),
    [thorough(4, 2, 3, True), (2, 2, 2, False), thorough(2, 2, 3, True), thorough(4, 4, 1, True)],
)
def test_trains_as_on_whole_sequences(ranks_: int, parts: int, zero: int, causal: bool, ranks: Pool) -> None:
    """Parameters are sharded over both dimensions, and the plan has the events of the run."""
    losses, grads = reference(ranks_ // parts, causal)
    runs = ranks(ranks_, trained, parts, zero, causal)
    for mine, planned in zip(runs[0]["schedule"].events, runs[0]["plan"].events, strict=True):
        assert mine == planned
    assert runs[0]["schedule"] == runs[0]["plan"]
    for run in runs:
        assert run["losses"] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(run["grads"], grads, rtol=1e-3, atol=1e-6)
        started = [event for _, event in run["schedule"].of(Kind.COLLECTIVE)]
        assert all(event.group.endswith(f"×{parts}") for event in started)
        ops = [(event.phase, "gather" if "gather" in event.op else event.op) for event in started]
        assert ops[0] == (Phase.FORWARD, "gather") and len(ops) == 2
        assert ops[1][0] is Phase.BACKWARD and "reduce_scatter" in ops[1][1]


def hugging_face() -> tuple[float, dict[str, torch.Tensor]]:
    mesh, flat = meshes(2)
    context, model = ContextParallel(mesh["cp"]), llama(vocab_size=VOCAB)
    use_in(model, context)
    model = fxshard.compile(model, mesh=flat, lowering="eager")
    x, y = context.shard(*batch(0, 0))
    loss = model(input_ids=x, labels=x, shift_labels=y, position_ids=context.positions(LENGTH)).loss
    loss.backward()
    mean = loss.detach() / 2
    dist.all_reduce(mean)
    return float(mean), full_gradients(model)


@pytest.mark.thorough
def test_a_model_of_transformers(ranks: Pool) -> None:
    pytest.importorskip("transformers")
    model = llama(vocab_size=VOCAB)
    x, y = batch(0, 0)
    loss = model(input_ids=x, labels=x, shift_labels=y).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    for found, gradients in ranks(2, hugging_face):
        assert found == pytest.approx(float(loss.detach()), rel=1e-5)
        torch.testing.assert_close(gradients, grads, rtol=1e-3, atol=1e-6)


def inside_torchs_block() -> dict[str, Any]:
    """Captured before the block, called in it with what it cut, and after it with what ``ContextParallel`` cuts."""
    mesh, flat = meshes(2)
    context = ContextParallel(mesh["cp"])
    model = fxshard.compile(cut(Model(), mesh), mesh=flat, lowering="eager")
    plain = fxshard.compile(Model(), mesh=flat, lowering="eager")
    own = (*context.shard(*batch(0, 0)), context.positions(LENGTH).clone())
    plain(*own)
    whole = [*(part.clone() for part in batch(0, 0)), torch.arange(LENGTH).unsqueeze(0).clone()]
    said = []
    with context_parallel(mesh["cp"], buffers=whole, buffer_seq_dims=[1, 1, 1]):
        for each in (plain, model):  # one that was captured outside, and one that would be captured here
            with pytest.raises(fxshard.ConfigError) as error:
                each(*whole)
            said.append(str(error.value))
        alike = all(map(torch.equal, whole, own))
    loss = plain(*own)  # of this rank's tokens alone: it still runs
    assert torch.isfinite(loss)
    loss = model(*own)
    loss.backward()
    mean = loss.detach() / 2
    dist.all_reduce(mean)
    return {"said": said, "alike": alike, "loss": float(mean), "grads": full_gradients(model)}


@pytest.mark.thorough
def test_torchs_own_block_is_refused_and_cuts_sequences_alike(ranks: Pool) -> None:
    model = Model()
    x, y = batch(0, 0)
    loss = model(x, y, torch.arange(LENGTH).unsqueeze(0))
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    for run in ranks(2, inside_torchs_block):
        assert all(
            "torch's context_parallel()" in each and "ContextParallel(mesh).shard" in each for each in run["said"]
        )
        assert len(run["said"]) == 2 and run["alike"]
        assert run["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        torch.testing.assert_close(run["grads"], grads, rtol=1e-3, atol=1e-6)


def refused() -> list[str]:
    mesh, _ = meshes(2)
    context = ContextParallel(mesh["cp"])
    x = torch.zeros(1, 2, 3, 4)

    def said(call: Any) -> str:
        with pytest.raises(fxshard.ConfigError) as error:
            call()
        return str(error.value)

    return [
        said(lambda: ContextParallel(mesh)),
        said(lambda: context.shard(torch.zeros(2, 10))),
        said(lambda: context.positions(6)),
        said(lambda: context.attention(x, x, x)),
        said(lambda: context.attention(x[:, :, :2], x[:, :, :2], x[:, :, :2, :2])),
    ]


def test_what_is_refused(ranks: Pool) -> None:
    for several, length, positions, odd, shapes in ranks(2, refused):
        assert "2 dimensions" in several and 'mesh["cp"]' in several
        assert "sequences of 10 tokens" in length and "pad them to a multiple of 4" in length
        assert "sequences of 6 tokens" in positions
        assert "3 queries and 3 keys" in odd and "one shape" in shapes
