"""On a Hopper GPU: dense MLPs whose first product takes the activation along train like the model as it is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxshard
from fxshard.bench.models import MLP, Llama, LlamaConfig
from fxshard.frontend.backend import fxshard_backend
from fxshard.kernels.case import Case
from fxshard.kernels.choose import refusal
from fxshard.kernels.dense_op import dense_mlp
from tests.replaying import counts

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
CONFIG = LlamaConfig(vocab=512, dim=512, layers=3, heads=8, hidden=1408)
ROWS, LENGTH = 32, 128
"""Short: attention over longer ones adds up gradients in any order."""


@pytest.fixture(autouse=True)
def available() -> None:
    reason = refusal("triton", Case(torch.device("cuda"), BF16, CONFIG.dim, CONFIG.hidden))
    if reason is not None:
        pytest.skip(reason)


def sharded(**options: Any) -> fxshard.ShardedModule:
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = Llama(CONFIG)
    plain.embed.requires_grad_(False)  # whose gradient is added up by atomic additions, in any order
    precision = fxshard.Precision(param=BF16, reduce=torch.float32)
    return fxshard.compile(plain, precision=precision, optimizer=fxshard.AdamW(lr=1e-3), **options)


def steps(model: fxshard.ShardedModule, count: int = 3) -> list[torch.Tensor]:
    """Losses, and the gradients of the last step."""
    found = []
    for number in range(count):
        x = torch.randint(0, CONFIG.vocab, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number)).cuda()
        model.optimizer.zero_grad()
        loss = model(x, x)
        loss.backward()
        found.append(loss.detach())
        model.optimizer.step()
    return found + [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def requested() -> int:
    """Bytes that tensors have, without what the allocator adds to a block that it does not split."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def operators(model: fxshard.ShardedModule) -> int:
    return str(model.graphs["forward"].graph).count("fxshard.dense_swiglu.default")


@pytest.mark.shows("G1", "G3")
def test_bitwise_what_the_compiler_makes_of_an_mlp() -> None:
    """The kernel multiplies and rounds like cuBLAS and the compiler, and backward is autograd's own formulas."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        mlp = MLP(CONFIG.dim, CONFIG.hidden).to(BF16)
        x = torch.randn(ROWS, LENGTH, CONFIG.dim, dtype=BF16, requires_grad=True)
    leaves = [x, *mlp.parameters()]
    found = {}
    for experts in ("auto", "off"):
        out = torch.compile(mlp, backend=fxshard_backend, dynamic=False, options={"experts": experts})(x)
        found[experts] = (out, *torch.autograd.grad(out.sum(), leaves))
        torch.compiler.reset()
    report = fxshard.explain(mlp, (x,))
    assert [str(fused) for fused in report.fused] == ["fused by triton: a dense MLP, SwiGLU, gate and up separate"]
    assert [torch.equal(a, b) for a, b in zip(found["auto"], found["off"], strict=True)] == [True] * 5


@pytest.mark.shows("G1", "G3")
def test_a_llama_trains_as_it_is_written() -> None:
    """Its first loss is the same bit by bit. Gradients are where segments end, and they end elsewhere: what the
    compiler keeps in fp32 inside of one is rounded between two."""
    fused, written = sharded(), sharded(experts="off")
    mine, theirs = steps(fused), steps(written)
    assert operators(fused) == CONFIG.layers and operators(written) == 0
    assert torch.equal(mine[0], theirs[0])
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(mine, theirs, strict=True)) < 2e-2


@pytest.mark.shows("P2")
def test_a_plan_made_without_a_gpu_has_the_events_of_the_run() -> None:
    model = sharded()
    steps(model, 1)
    with torch.device("meta"):
        plain, tokens = Llama(CONFIG), torch.empty(ROWS, LENGTH, dtype=torch.int64)
    plain.embed.requires_grad_(False)
    plan = fxshard.plan(
        plain,
        (tokens, tokens),
        world_size=1,
        hardware="h200",
        precision=fxshard.Precision(param=BF16, reduce=torch.float32),
        optimizer=fxshard.AdamW(lr=1e-3),
    )
    mine, theirs = ([(e.kind, e.bucket, e.phase) for e in schedule.events] for schedule in (plan, model.schedule))
    assert mine == theirs


def test_captured_as_a_cuda_graph() -> None:
    graphs, plain = sharded(cuda_graphs=True), sharded()
    mine, theirs = steps(graphs, 5), steps(plain, 5)
    assert operators(graphs) == CONFIG.layers and counts(graphs)[1] > 0
    assert [torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)] == [True] * len(mine)


def test_no_more_is_saved_for_backward() -> None:
    """Least of all the activation of each layer, which backward makes again in both forms."""
    saved = {}
    x = torch.randint(0, CONFIG.vocab, (ROWS, LENGTH), device="cuda")
    for experts in ("auto", "off"):
        model = sharded(experts=experts)
        steps(model)
        before = requested()
        loss = model(x, x)
        saved[experts] = requested() - before
        loss.backward()
        del model, loss
    assert saved["auto"] <= saved["off"], saved


@pytest.mark.shows("G3")
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("rows", [1, 4096])
def test_any_number_of_rows(rows: int, joined: bool) -> None:
    """Against the same in fp64."""
    dim, inner = 576, 704  # no multiples of a tile
    generator = torch.Generator("cuda").manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        value = torch.randn(*shape, device="cuda", generator=generator) * shape[-1] ** -0.5
        return value.to(BF16).requires_grad_()

    x, down = leaf(rows, dim), leaf(dim, inner)
    first = [leaf(2 * inner, dim)] if joined else [leaf(inner, dim), leaf(inner, dim)]
    leaves = [x, *first, down]
    out = dense_mlp(x, first[0], None if joined else first[1], down, "triton")
    mine = (out, *torch.autograd.grad(out.float().square().sum(), leaves))
    wide = [value.detach().double().requires_grad_() for value in leaves]
    gate, up = F.linear(wide[0], wide[1]).chunk(2, -1) if joined else (F.linear(wide[0], w) for w in wide[1:3])
    exact = F.linear(F.silu(gate) * up, wide[-1])
    theirs = (exact, *torch.autograd.grad(exact.square().sum(), wide))
    assert max(float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, theirs, strict=True)) < 1.5e-2
