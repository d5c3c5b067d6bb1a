"""A dense gated MLP is a single expert, where an implementation says that this is faster. None does on a CPU, so one is
added here that says so: what it computes is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.kernels.by_torch import TorchExperts
from fxshard.kernels.choose import add_implementation
from fxshard.kernels.dense_op import dense_swiglu
from tests.fused import models
from tests.fused.test_patterns import check_same, rewritten
from tests.pool import Pool
from tests.toy import batch
from tests.training import EPS, VOCAB, Run, plain_run, train

DIM, INNER, ROWS = 16, 24, 6


class Eager(TorchExperts):
    """Takes dense MLPs, too."""

    takes_dense = True


add_implementation("takes-dense", Eager)


@torch.library.custom_op("fxshard_tests::doubled", mutates_args=["x"])
def doubled(factor: float, x: Tensor) -> None:
    x.mul_(2 * factor)


@doubled.register_fake
def _(factor: float, x: Tensor) -> None:
    return None


class Joined(nn.Module):
    def __init__(self, dim: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Checkpointed(models.Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def run(model: Callable[[Tensor], Tensor], x: Tensor, params: nn.Module) -> dict[str, Tensor]:
    leaves = {"x": x, **dict(params.named_parameters())}
    out = model(x)
    return {
        "out": out.detach(),
        **dict(zip(leaves, torch.autograd.grad(out.square().sum(), list(leaves.values())), strict=True)),
    }


@pytest.mark.shows("G1")
@pytest.mark.parametrize("shape", [(DIM,), (ROWS, DIM), (2, 3, DIM)], ids=["one", "rows", "batch"])
@pytest.mark.parametrize("make", [models.Mlp, Joined])
def test_an_mlp_is_found_and_computes_the_same(make: Any, shape: tuple[int, ...]) -> None:
    model, x = make(DIM, INNER), torch.randn(shape, requires_grad=True)
    reference = run(model, x, model)
    fused, report, calls = rewritten(model, experts="takes-dense")
    check_same(run(fused, x, model), reference)
    (found,) = report.fused
    form = "joined" if make is Joined else "separate"
    assert str(found) == f"fused by takes-dense: a dense MLP, SwiGLU, gate and up {form}"
    assert sum("dense_mlp" in target for target in calls) == 1 and not any("linear" in target for target in calls)


class Clamped(models.Mlp):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x).clamp(max=7), self.up(x).clamp(-7, 7)
        return self.down(F.silu(gate) * up)


class Written(models.Mlp):
    """Changes its input after the first products."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        hidden = F.silu(self.gate(x)) * self.up(x)
        x.mul_(2)
        return self.down(hidden) + x


class Narrowing(models.Mlp):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__(dim, inner)
        self.down = nn.Linear(inner, dim // 2, bias=False)


class WithoutGradients(models.Mlp):
    """Whose first products nothing is differentiated through."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden) + x


class Rounding(models.Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden.to(torch.float8_e4m3fn).to(x.dtype))


class InPlace(models.Mlp):
    """Changes its gate by a call whose ``inplace`` has no name."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        F.relu(gate, True)
        return self.down(F.silu(gate) * self.up(x))


class ByOperator(models.Mlp):
    """Changes its input by an operator whose name says nothing to Python."""

    def __init__(self, dim: int, inner: int, change: Callable[[Tensor], Any]) -> None:
        super().__init__(dim, inner)
        self.change = change
        self.requires_grad_(False)  # or autograd would refuse it

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        up = self.up(x)
        self.change(x)
        return self.down(F.silu(self.gate(x)) * up)


class CastTwice(models.Mlp):
    """One of two casts is a constant to autograd."""

    def forward(self, x: Tensor) -> Tensor:
        first = x.bfloat16()
        with torch.no_grad():
            second = x.bfloat16()
        return self.down(F.silu(self.gate(first)) * self.up(second)).float()


class GateSecond(Joined):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class OfItself(models.Mlp):
    """Multiplies by what it computed."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return F.linear(F.silu(gate) * self.up(x), gate[:DIM])


class Between(models.Mlp):
    """In a type of its own, with something between the products."""

    def __init__(self, dim: int, inner: int, dtype: torch.dtype, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__(dim, inner)
        self.to(dtype)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.down.weight.dtype)
        return self.down(self.between(F.silu(self.gate(x)) * self.up(x))).float()


class Read(models.Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden) + hidden.sum()


LEFT: dict[str, tuple[Any, str]] = {
    "a bias": (lambda: Joined(DIM, INNER, bias=True), "it has biases"),
    "clamped": (lambda: Clamped(DIM, INNER), "its activation is not plain SwiGLU"),
    "its input is changed": (lambda: Written(DIM, INNER), "is changed in place inside"),
    "another width behind": (lambda: Narrowing(DIM, INNER), "its input is 16 wide, its output 8"),
    "no gradients inside": (lambda: WithoutGradients(DIM, INNER), "gradients or autocast are switched"),
    "rounded inside": (lambda: Rounding(DIM, INNER), "rounded to torch.float8_e4m3fn"),
    "changed by an overload": (
        lambda: ByOperator(DIM, INNER, lambda x: torch.ops.aten.mul_.Tensor(x, 2.0)),
        "is changed in place inside",
    ),
    "changed in a list": (
        lambda: ByOperator(DIM, INNER, lambda x: torch._foreach_mul_([x], 2.0)),
        "is changed in place inside",
    ),
    "changed by an operator of one's own": (
        lambda: ByOperator(DIM, INNER, lambda x: torch.ops.fxshard_tests.doubled(1.0, x)),
        "is changed in place inside",
    ),
    "changed inside": (lambda: InPlace(DIM, INNER), "is changed in place between the products"),
    "gate second": (lambda: GateSecond(DIM, INNER), "gate is not the first half"),
    "a weight from inside": (lambda: OfItself(DIM, INNER), "depends on what lies between the products"),
    "read elsewhere": (lambda: Read(DIM, INNER), "what lies between the products is returned"),
    "checkpointed": (lambda: Checkpointed(DIM, INNER), "as a checkpointed region is"),
    "cast without gradients": (lambda: CastTwice(DIM, INNER).bfloat16(), "gate and up project different inputs"),
    "rounded to another range": (
        lambda: Between(DIM, INNER, torch.bfloat16, lambda h: h.half().bfloat16()),
        "rounded to torch.float16",
    ),
    "rounded to fewer digits": (
        lambda: Between(DIM, INNER, torch.float16, lambda h: h.bfloat16().half()),
        "rounded to torch.bfloat16",
    ),
}


@pytest.mark.shows("G2")
@pytest.mark.parametrize("kind", LEFT)
def test_a_near_miss_is_left_as_written(kind: str) -> None:
    make, reason = LEFT[kind]
    model, x = make(), torch.randn(DIM, DIM, requires_grad=True)
    fused, report, calls = rewritten(model, experts="takes-dense")
    mine, theirs = fused(x), model(x)
    (left,) = report.left
    assert reason in left.reason and not report.fused and not any("dense_mlp" in target for target in calls)
    assert torch.equal(mine, theirs)
    if kind == "its input is changed":
        return  # which autograd itself refuses to differentiate
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    leaves = [x, *model.parameters()]
    found, wanted = (torch.autograd.grad(out.sum(), leaves, allow_unused=True) for out in (mine, theirs))
    assert [grad is None for grad in found] == [grad is None for grad in wanted]


def test_a_vector_is_no_second_product() -> None:
    class Dot(models.Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.silu(self.gate(x)) * self.up(x), self.down.weight[0])

    model, x = Dot(DIM, INNER), torch.randn(ROWS, DIM)
    fused, report, _ = rewritten(model, experts="takes-dense")
    assert torch.equal(fused(x), model(x)) and not report.fused and not report.left


def test_torch_func_elsewhere_in_the_graph_changes_nothing() -> None:
    """As where a mask is made by ``vmap``."""

    class Masked(models.Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.vmap(lambda row: row * 2)(x))

    model, x = Masked(DIM, INNER), torch.randn(ROWS, DIM)
    fused, report, _ = rewritten(model, experts="takes-dense")
    torch.testing.assert_close(fused(x), model(x))
    assert len(report.fused) == 1 and not report.left


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_what_torch_func_transforms_is_left_as_written(transform: str) -> None:
    """Operators of our own have no rules for it; a tangent would be lost without a word."""
    model, x = models.Mlp(DIM, INNER), torch.randn(ROWS, DIM)

    def run(x: Tensor) -> Any:
        if transform == "grad":
            return torch.func.grad(lambda z: model(z).square().sum())(x)
        return torch.func.jvp(lambda z: z + model(z), (x,), (x,))[1]

    compiled = torch.compile(run, backend="fxshard", options={"experts": "takes-dense", "lowering": "eager"})
    torch.testing.assert_close(compiled(x), run(x))


def test_tensors_with_products_of_their_own_are_left_to_them() -> None:
    model = models.Mlp(DIM, INNER)
    for linear in (model.gate, model.up, model.down):
        weight = linear.weight.detach()
        linear.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    report = fxshard.explain(model, (torch.randn(ROWS, DIM),), experts="takes-dense")
    (found,) = report.left
    assert "is a TwoTensor, which has products of its own" in found.reason


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        ("auto", "one expert: there is nothing to group, and the compiler fuses its activation"),
        ("triton", "one expert: they are on cpu, its kernels need a CUDA device"),
        ("te", "one expert: they are on cpu, Transformer Engine needs a CUDA device"),
        ("te-mxfp8", "one expert: "),
    ],
)
def test_where_it_does_not_pay_nothing_is_refused(experts: str, reason: str) -> None:
    """Other than experts, for which an implementation that cannot run is an error."""
    report = fxshard.explain(models.Mlp(DIM, INNER), (torch.randn(ROWS, DIM),), experts=experts)
    (found,) = report.left
    assert reason in found.reason and not report.fused


@pytest.mark.shows("G2")
def test_weights_in_mxfp8_are_multiplied_one_by_one() -> None:
    model = fxshard.compile(llama(), precision=fxshard.MXFP8(), lowering="eager", experts="takes-dense")
    tokens = torch.randint(0, VOCAB, (2, 16))
    model(tokens, tokens).backward()
    assert "dense_swiglu" not in str(model.graphs["forward"].graph)
    reasons = {left.reason for left in fxshard.explain(model, (tokens, tokens), experts="takes-dense").left}
    assert reasons == {
        "a dense gated MLP, one expert: the model has weights in MXFP8 or float8, whose products run one at a time"
    }


def test_the_number_of_rows_may_vary() -> None:
    """It is not asked for, so nothing is compiled again for another one."""
    model = models.Mlp(DIM, INNER)
    options = {"experts": "takes-dense", "lowering": "eager"}
    compiled = torch.compile(model, backend="fxshard", dynamic=True, options=options)
    for rows in (7, 9):
        x = torch.randn(rows, DIM)
        torch.testing.assert_close(compiled(x), model(x))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.randn(12, DIM))


def test_opcheck() -> None:
    x, gate, up, down = (torch.randn(s, requires_grad=True) for s in ((8, 6), (4, 6), (4, 6), (6, 4)))
    torch.library.opcheck(dense_swiglu, (x, gate, up, down, "torch"))
    torch.library.opcheck(dense_swiglu, (x, torch.randn(8, 6, requires_grad=True), None, down, "torch"))


# -- sharded -----------------------------------------------------------------------------------------------------------


def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocab=VOCAB, dim=32, layers=1, heads=2, hidden=48))


@pytest.mark.thorough
@pytest.mark.shows("P2")
def test_a_plan_is_for_the_kernels_of_its_machine() -> None:
    """A Hopper has one for dense MLPs in bf16, whoever plans for it; not asked for, or in fp32, it is not used."""

    def events(machine: str, experts: str = "auto", **options: Any) -> list[Any]:
        with torch.device("meta"):
            model = Llama(LlamaConfig(vocab=64, dim=512, layers=1, heads=8, hidden=1408))
        tokens = torch.empty(2, 1024, dtype=torch.int64, device="meta")
        return fxshard.plan(
            model, (tokens, tokens), world_size=8, hardware=machine, lowering="eager", experts=experts, **options
        ).events

    bf16 = {"precision": fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)}
    written = events("h200", "off", **bf16)
    assert events("h200", "triton", **bf16) != written and events("h200", "torch", **bf16) == written
    assert events("h200") == events("h200", "off")


@dataclass
class Trained:
    run: Run
    schedule: fxshard.Schedule
    targets: list[str]
    """What the nodes of forward and backward call."""
    saved: list[tuple[int, ...]]
    """Shapes of what forward computes for backward."""


def trained() -> dict[str, Trained]:
    found = {}
    for experts in ("takes-dense", "off"):
        model = fxshard.compile(llama(), optimizer=fxshard.AdamW(lr=1e-3, eps=EPS), lowering="eager", experts=experts)
        run = train(model, model.optimizer, 2)
        model.schedule.verify()
        forward, backward = (model.graphs[phase].graph for phase in ("forward", "backward"))
        targets = [str(node.target) for graph in (forward, backward) for node in graph.nodes]
        saved = [
            tuple(node.meta["val"].shape)
            for node in forward.output_node().all_input_nodes
            if node.op != "placeholder" and isinstance(node.meta.get("val"), Tensor)
        ]
        found[experts] = Trained(run, model.schedule, targets, saved)
    return found


@pytest.fixture(scope="module")
def by_rank(ranks: Pool) -> list[dict[str, Trained]]:
    return ranks(2, trained)


@pytest.mark.shows("P2")
def test_a_plan_has_the_events_of_the_run(by_rank: list[dict[str, Trained]]) -> None:
    """Which are not those of the model as it is written: backward wants its weights in another order."""
    options: dict[str, Any] = {"hardware": "cpu", "lowering": "eager", "optimizer": fxshard.AdamW()}
    planned = fxshard.plan(llama(), batch(0, 2, 0, VOCAB), world_size=2, experts="takes-dense", **options)
    assert all(planned == found["takes-dense"].schedule for found in by_rank)
    assert all(found["takes-dense"].schedule.events != found["off"].schedule.events for found in by_rank)


@pytest.mark.shows("G3")
def test_zero_3_trains_like_the_plain_model(by_rank: list[dict[str, Trained]]) -> None:
    reference = plain_run(2, llama, steps=2)
    for found in by_rank:
        for experts, case in found.items():
            assert case.run.losses == pytest.approx(reference.losses, rel=2e-6), experts
            assert case.run.distance(reference) < 5e-6, experts


def test_gradients_of_its_weights_are_written_where_they_stay(by_rank: list[dict[str, Trained]]) -> None:
    for found in by_rank:
        targets = found["takes-dense"].targets
        assert targets.count("fxshard.dense_swiglu.default") == 1
        assert targets.count("fxshard.mm_into.default") == 3


def test_the_activation_is_not_saved(by_rank: list[dict[str, Trained]]) -> None:
    """Pre-activations are; also as the model is written, by ``recompute_operands``."""
    for found in by_rank:
        inner = {experts: sum(shape[-1] == 48 for shape in case.saved if shape) for experts, case in found.items()}
        assert inner == {"takes-dense": 2, "off": 2}
