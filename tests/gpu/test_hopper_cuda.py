"""On a Hopper: grouped products in Gluon against torch's, for groups that end anywhere."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxshard.kernels import hopper_products
from fxshard.kernels.glu import CLAMPED_GEGLU, SWIGLU, Glu
from tests.fused.reference import distances, fused, problem

# Two sides that do not agree about a barrier wait for ever, in a call that no signal interrupts; and a device on which
# a kernel hangs is of no use to other tests. So a thread ends the run, and says where it was.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60, method="thread")]
BF16 = torch.bfloat16
GROUPS = {
    "ragged": ([130, 0, 1, 300, 64, 17], 0),
    "one expert has all, and a tail": ([0, 0, 513, 0], 37),
    "single rows": ([1] * 40, 3),
    "more tiles than processors": ([4100, 0, 3500, 128, 129], 0),
    "no tokens at all": ([0, 0], 5),
}


@pytest.fixture(autouse=True)
def hopper() -> None:
    reason = hopper_products.refusal(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)


class Case:
    """Tokens, of which those behind the last group are not numbers, and weights as ``nn.Linear`` has them."""

    def __init__(self, counts: list[int], tail: int = 0, depth: int = 576, width: int = 704) -> None:
        torch.manual_seed(0)
        self.rows = sum(counts)
        self.x = torch.randn(self.rows + tail, depth, device="cuda", dtype=BF16)
        self.x[self.rows :] = torch.nan
        self.weight = torch.randn(len(counts), width, depth, device="cuda", dtype=BF16) * depth**-0.5
        self.offsets = torch.tensor(counts, device="cuda").cumsum(0).int()
        self.routing = torch.rand(self.rows + tail, device="cuda", dtype=BF16)

    def exact(self) -> torch.Tensor:
        groups = pairwise([0, *self.offsets.tolist()])
        return torch.cat([self.x[a:b].double() @ self.weight[e].double().t() for e, (a, b) in enumerate(groups)])


class Canaries(torch.Tensor):
    """Makes tensors that are full of sevens, where they would have nothing in particular."""

    def new_empty(self, *size: int) -> torch.Tensor:  # type: ignore[override]
        return torch.full(size, 7.0, device="cuda", dtype=BF16)


def laid(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return weight.mT if transposed else weight.mT.contiguous()


@pytest.mark.shows("G3")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_a_product(groups: str, transposed: bool) -> None:
    case = Case(*GROUPS[groups])
    weight = laid(case.weight, transposed)
    mine = hopper_products.product(case.x, weight, case.offsets)[: case.rows]
    theirs = F.grouped_mm(case.x, weight, offs=case.offsets)[: case.rows]
    assert mine.isfinite().all()
    assert distances({"y": mine}, {"y": case.exact()})["y"] < 3e-3
    assert distances({"y": mine}, {"y": theirs})["y"] < 3e-3
    assert torch.equal(hopper_products.product(case.x, weight, case.offsets)[: case.rows], mine)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [8, 16, 64, 72, 256])
@pytest.mark.parametrize("rows", [1, 130, 4097])
def test_a_sum_of_products(rows: int, rank: int, transposed: bool) -> None:
    """Over 9 stages and one to four more, of which the last is not full; and over more tiles than processors."""
    torch.manual_seed(0)
    depth, width = 576, 2312
    x, narrow = (torch.randn(rows, columns, device="cuda", dtype=BF16) for columns in (depth, rank))
    weight, other = (torch.randn(width, columns, device="cuda", dtype=BF16) for columns in (depth, rank))
    assert not hopper_products.adds(x, laid(weight, transposed), narrow, laid(other, not transposed))
    weight, other = laid(weight, transposed), laid(other, transposed)
    assert hopper_products.adds(x, weight, narrow, other)
    mine = hopper_products.sum_of_products(x.as_subclass(Canaries), weight, narrow, other)
    exact = x.double() @ weight.double() + narrow.double() @ other.double()
    assert distances({"y": mine}, {"y": exact})["y"] < 3e-3
    for _ in range(2):
        assert torch.equal(hopper_products.sum_of_products(x, weight, narrow, other), mine)


@pytest.mark.shows("G3")
@pytest.mark.parametrize("glu", [SWIGLU, CLAMPED_GEGLU], ids=["swiglu", "geglu"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_a_product_with_the_activation(groups: str, weighted: bool, glu: Glu) -> None:
    case = Case(*GROUPS[groups])
    case.weight *= 3
    routing = case.routing if weighted else None
    pre, _, hidden = hopper_products.up(case.x, case.weight.mT, None, routing, case.offsets, glu)
    assert distances({"pre": pre[: case.rows]}, {"pre": case.exact()})["pre"] < 3e-3
    same_as_the_kernel_for_the_activation(case, pre, hidden, routing, glu)
    gate, up = (half.mT for half in case.weight.chunk(2, 1))
    apart = hopper_products.up(case.x, gate, up, routing, case.offsets, glu)
    for mine, joined in zip(apart, (*pre.chunk(2, 1), hidden), strict=True):
        assert torch.equal(mine[: case.rows], joined[: case.rows])


def test_weights_that_lie_the_other_way() -> None:
    case = Case(*GROUPS["ragged"])
    there = hopper_products.up(case.x, laid(case.weight, True), None, None, case.offsets)
    here = hopper_products.up(case.x, laid(case.weight, False), None, None, case.offsets)
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))
    gate, up = (half.mT for half in case.weight.chunk(2, 1))
    mixed = hopper_products.up(case.x, gate, up.contiguous(), None, case.offsets)
    assert torch.equal(mixed[2], there[2])


@pytest.mark.parametrize(("dtype", "shift"), [(BF16, 1), (torch.float32, 0)])
def test_routing_weights_of_other_types_and_addresses(dtype: torch.dtype, shift: int) -> None:
    """After those that are aligned: a kernel that was compiled for them must not be taken."""
    case = Case(*GROUPS["ragged"])
    hopper_products.up(case.x, case.weight.mT, None, case.routing, case.offsets)
    routing = torch.rand(case.rows + 8, device="cuda", dtype=dtype)[shift : shift + case.rows]
    pre, _, hidden = hopper_products.up(case.x, case.weight.mT, None, routing, case.offsets)
    same_as_the_kernel_for_the_activation(case, pre, hidden, routing, SWIGLU)
    clone = hopper_products.up(case.x, case.weight.mT, None, routing.clone(), case.offsets)
    assert torch.equal(clone[2], hidden)


def same_as_the_kernel_for_the_activation(
    case: Case, pre: torch.Tensor, hidden: torch.Tensor, routing: torch.Tensor | None, glu: Glu
) -> None:
    from fxshard.kernels import activation_kernels

    for _ in range(2):  # the first launch of a kernel goes another way than those behind it
        theirs = activation_kernels.activate(pre, None, routing, glu)
        assert torch.equal(hidden[: case.rows], theirs[: case.rows])


def test_nothing_is_written_behind_the_groups() -> None:
    case = Case(*GROUPS["one expert has all, and a tail"])
    x = case.x.as_subclass(Canaries)
    results = [
        hopper_products.product(x, case.weight.mT, case.offsets),
        *hopper_products.up(x, case.weight.mT, None, None, case.offsets)[::2],
    ]
    for result in results:
        assert (result[case.rows :] == 7).all() and (result[: case.rows] != 7).any(1).all()


def test_groups_do_not_see_each_other() -> None:
    case = Case(*GROUPS["ragged"])
    alone = hopper_products.product(case.x, case.weight.mT, case.offsets)
    begin, end = 131, 431  # the group of 300
    case.x[begin:end] = torch.nan
    beside = hopper_products.product(case.x, case.weight.mT, case.offsets)
    assert torch.equal(beside[:begin], alone[:begin]) and torch.equal(beside[end:], alone[end:])
    assert beside[begin:end].isnan().all()


class Gradients:
    """Both operands of weight gradients, of which the rows behind the last group are not numbers."""

    def __init__(self, counts: list[int], tail: int, rows: int, columns: int) -> None:
        torch.manual_seed(0)
        self.a = torch.randn(sum(counts) + tail, rows, device="cuda", dtype=BF16)
        self.b = torch.randn(sum(counts) + tail, columns, device="cuda", dtype=BF16)
        self.a[sum(counts) :] = self.b[sum(counts) :] = torch.nan
        self.offsets = torch.tensor(counts, device="cuda").cumsum(0).int()
        self.bounds = list(pairwise([0, *self.offsets.tolist()]))

    def compute(self) -> torch.Tensor:
        out = hopper_products.gradient(self.a, self.b, self.offsets)
        torch.cuda.synchronize()  # if it hangs, then here
        return out

    def check(self) -> None:
        """Each group against its own product in fp32, zeros where there is none, and the same bits every time."""
        # Memory that the result is likely to be made of: what is not written is seen.
        torch.full((len(self.bounds), self.a.shape[1], self.b.shape[1]), 7.0, device="cuda", dtype=BF16)
        mine = self.compute()
        for expert, (begin, end) in enumerate(self.bounds):
            if begin == end:
                assert (mine[expert] == 0).all()
            else:
                exact = self.a[begin:end].float().t() @ self.b[begin:end].float()
                assert distances({"g": mine[expert]}, {"g": exact})["g"] < 3e-3
        for _ in range(3):
            assert torch.equal(self.compute(), mine)


@pytest.mark.shows("G3")
@pytest.mark.parametrize(("rows", "columns"), [(704, 576), (136, 264), (264, 136), (1024, 512)])
@pytest.mark.parametrize("groups", GROUPS)
def test_weight_gradients(groups: str, rows: int, columns: int) -> None:
    Gradients(*GROUPS[groups], rows, columns).check()


@pytest.mark.parametrize(
    "counts",
    [[512, 320], [320, 512], [512, 512], [2070, 3, 0, 5011, 64, 1997, 2107, 65], [1] * 15, [0] * 7 + [700]],
    ids=lambda counts: f"{len(counts)} groups of {min(counts)} to {max(counts)}",
)
def test_weight_gradients_of_several_tiles_a_program(counts: list[int]) -> None:
    """Tiles of one program take different numbers of steps. The first case hung while those of the first tile were
    taken for all: the side that multiplies waited for stages that nobody filled."""
    Gradients(counts, 9, 2048, 2048).check()


def routed(experts: int) -> list[int]:
    torch.manual_seed(0)
    return torch.randint(experts, (16384,)).bincount(minlength=experts).tolist()


@pytest.mark.shows("G3")
@pytest.mark.parametrize(
    ("experts", "rows", "columns"),
    [(8, 4096, 4096), (8, 4096, 2048), (64, 2816, 2048), (64, 2048, 1408)],
)
def test_weight_gradients_at_the_sizes_of_the_benchmark(experts: int, rows: int, columns: int) -> None:
    case = Gradients(routed(experts), 0, rows, columns)
    case.check()
    theirs = F.grouped_mm(case.a.t(), case.b, offs=case.offsets)
    assert distances({"g": case.compute()}, {"g": theirs})["g"] < 3e-3


@pytest.mark.parametrize("seed", range(6))
def test_weight_gradients_of_random_groups(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [0, 1, 63, 64, 65, 255, 256, 257]
    counts = [draw.choice([*sizes, draw.randrange(1500)]) for _ in range(draw.randrange(1, 48))]
    rows, columns = (8 * draw.randrange(16, 130) for _ in range(2))
    Gradients(counts, draw.randrange(70), rows, columns).check()


def test_weight_gradients_do_not_see_other_groups() -> None:
    case = Gradients(*GROUPS["ragged"], 704, 576)
    alone = case.compute()
    case.a[131:431], case.b[131:431] = torch.nan, torch.inf  # the group of 300
    beside = case.compute()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(beside[others], alone[others]) and beside[3].isnan().all()


def test_all_products_are_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> None:
        real: Any = getattr(hopper_products, name)
        monkeypatch.setattr(hopper_products, name, lambda *args: (calls.append(name), real(*args))[1])

    counted("up")
    counted("product")
    counted("gradient")
    p = problem([130, 0, 1, 300], hidden=576, inner=704, dtype=BF16, device="cuda")
    fused(p, implementation="triton").sum().backward()
    assert sorted(calls) == ["gradient", "gradient", "product", "product", "product", "up"]
