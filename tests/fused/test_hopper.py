"""What surrounds the kernels for Hopper, without a GPU: where they are used, what a launch hands them, and when it is
a direct one."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from fxshard.kernels import choose, hopper_products, launch
from fxshard.kernels.by_torch import TorchExperts
from fxshard.kernels.glu import Glu
from fxshard.kernels.hopper_products import ANY, FAR, Copies
from tests.fused.reference import fused, problem, result_and_gradients

BF16 = torch.bfloat16
CUDA = torch.device("cuda")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Launches as if there were a Hopper, by the names that the kernel has for its arguments."""
    launches: list[dict[str, Any]] = []

    def recorder(file: str, kernel: str) -> Any:
        source = Path(hopper_products.__file__).with_name(file).read_text()
        functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        names = [argument.arg for argument in functions[kernel].args.args]

        def record(key: object, grid: tuple[int, ...], args: tuple[Any, ...], described: object) -> None:
            launches.append({"key": key, "grid": grid, **dict(zip(names, args, strict=True))})

        return record

    monkeypatch.setattr(hopper_products, "_launches", recorder("hopper_kernels.py", "grouped_kernel"), raising=False)
    gradients = recorder("hopper_gradient.py", "gradient_kernel")
    monkeypatch.setattr(hopper_products, "_gradients", gradients, raising=False)
    monkeypatch.setattr(hopper_products, "processors", lambda device: 132)
    monkeypatch.setattr(hopper_products, "available", lambda device: True)
    return launches


def address(copies: Copies, coordinates: tuple[int, ...]) -> int | None:
    """Where a bulk copy finds an element, or None where it is out of bounds. Addresses have 64 bits."""
    assert all(0 <= c < 2**31 for c in coordinates)
    if any(c >= bound for c, bound in zip(coordinates, copies.shape, strict=True)):
        return None
    distance = sum(c * stride for c, stride in zip(coordinates, copies.strides, strict=True))
    return (copies.base.data_ptr() + distance * copies.base.element_size()) % 2**64


@pytest.mark.parametrize("columns", [None, 256])
def test_ragged_copies_end_where_groups_do(columns: int | None) -> None:
    tokens = torch.zeros(700, 512, dtype=BF16)
    x = tokens if columns is None else tokens.narrow(1, 256, columns)
    copies = hopper_products._ragged(x, x.shape[1])
    # What the hardware asks of distances between rows: multiples of 16 bytes, below 2⁴⁰.
    assert all(s * 2 % 16 == 0 and 0 < s * 2 < 2**40 for s in copies.strides[:-1])
    for begin, end in ((0, 130), (130, 131), (131, 700), (700, 700)):
        size = end - begin
        for row in (0, 1, size - 1, size, size + 127):
            found = address(copies, (FAR, end, FAR - size + row, 8)) if row >= 0 else None
            assert found == (x[begin + row, 8].data_ptr() if 0 <= row < size else None)


def test_a_launch_of_a_product(launched: list[dict[str, Any]]) -> None:
    x, weight = torch.zeros(600, 512, dtype=BF16), torch.zeros(8, 704, 512, dtype=BF16)
    offsets = torch.full((8,), 600, dtype=torch.int32)
    assert hopper_products.product(x, weight.mT, offsets).shape == (600, 704)
    assert hopper_products.product(x, weight.mT.contiguous(), offsets).shape == (600, 704)
    there, here = launched
    assert (there["B_T"], there["b_desc"].block, there["b_desc"].shape) == (True, (256, 64), (8 * 704, 512))
    assert (here["B_T"], here["b_desc"].block, here["b_desc"].shape) == (False, (64, 256), (8 * 512, 704))
    assert there["b_desc"].base.data_ptr() == weight.data_ptr()  # which was not copied
    assert there["key"] != here["key"] and not there["GATED"] and there["up_desc"] is None
    assert [there[name] for name in ("experts", "across", "deep", "b_rows")] == [8, 3, 512, 704]
    assert there["grid"] == ((5 + 8) * 3, 1, 1) and there["PADDED"] == 32


def test_a_launch_of_a_product_with_the_activation(launched: list[dict[str, Any]]) -> None:
    x, weight = torch.zeros(600, 512, dtype=BF16), torch.zeros(64, 1408, 512, dtype=BF16)
    offsets, routing = torch.full((64,), 600, dtype=torch.int32), torch.zeros(601, dtype=BF16)[1:]
    pre, nothing, hidden = hopper_products.up(x, weight.mT, None, None, offsets)
    gate, up, _ = hopper_products.up(x, *(half.mT for half in weight.chunk(2, 1)), routing, offsets)
    assert pre.shape == (600, 1408) and nothing.numel() == 0 and hidden.shape == gate.shape == up.shape == (600, 704)
    joined, apart = launched
    assert joined["b_desc"] is joined["up_desc"] and joined["up_shift"] == 704 and apart["up_shift"] == 0
    assert joined["second_desc"].base.data_ptr() == pre[:, 704:].data_ptr()
    assert joined["out_desc"].shape == (ANY, ANY, FAR, 704) and joined["out_desc"].strides[1] == 1408
    assert apart["second_desc"].base is up and apart["up_desc"].shape == (64 * 704, 512)
    assert joined["GATED"] and joined["PADDED"] == 64 and joined["grid"] == (132, 1, 1)
    assert (joined["WEIGHTED"], apart["WEIGHTED"]) == (False, True) and "$4" in apart["ASM"]
    hopper_products.up(x, weight.mT, None, routing.clone(), offsets)
    assert len({launch["key"] for launch in launched}) == 3  # an odd address needs a kernel of its own


def test_a_launch_of_a_weight_gradient(launched: list[dict[str, Any]]) -> None:
    a, b = torch.zeros(600, 704, dtype=BF16), torch.zeros(600, 576, dtype=BF16)
    offsets = torch.full((8,), 600, dtype=torch.int32)
    out = hopper_products.gradient(a, b, offsets)
    (found,) = launched
    assert out.shape == (8, 704, 576) and found["out_desc"].base is out
    # A tile that is cut off by its matrix must not end up in the next one.
    assert found["out_desc"].shape == (8, 704, 576) and found["out_desc"].block == (1, 128, 64)
    assert found["a_desc"].base is a and found["a_desc"].shape == (ANY, ANY, FAR, 704)
    assert (found["a_desc"].block, found["b_desc"].block) == ((1, 1, 64, 128), (1, 1, 64, 256))
    assert [found[name] for name in ("experts", "height", "across")] == [8, 6, 3]
    assert found["grid"] == (132, 1, 1) and found["offsets"] is offsets
    hopper_products.gradient(a[:, :128].contiguous(), b[:, :256].contiguous(), offsets[:4])
    assert launched[1]["grid"] == (4, 1, 1) and launched[1]["key"] == found["key"]


def test_which_weight_gradients_the_kernel_computes(launched: list[dict[str, Any]]) -> None:
    a, b = torch.zeros(600, 704, dtype=BF16), torch.zeros(600, 576, dtype=BF16)
    odd = torch.zeros(600 * 576 + 1, dtype=BF16)[1:].view(600, 576)
    assert hopper_products.differentiates(a, b) and hopper_products.differentiates(b, a)
    assert not hopper_products.differentiates(a, odd) and not hopper_products.differentiates(odd, a)
    assert not hopper_products.differentiates(a[:0], b[:0])
    for dtype in (torch.float32, torch.float16):
        assert not hopper_products.differentiates(a.to(dtype), b.to(dtype))
        assert not hopper_products.differentiates(a, b.to(dtype)) and not hopper_products.differentiates(a.to(dtype), b)
    assert not hopper_products.differentiates(a, b[:, :132].contiguous())
    assert not hopper_products.differentiates(a[:, :132].contiguous(), b)
    assert not hopper_products.differentiates(a, b[:, :120].contiguous())
    assert hopper_products.differentiates(a[:, :128].contiguous(), b[:, :128].contiguous())
    assert not hopper_products.differentiates(torch.zeros(600, 8, dtype=BF16), b)  # the sum of rows


def test_what_the_kernels_multiply(launched: list[dict[str, Any]]) -> None:
    x, weight = torch.zeros(600, 512, dtype=BF16), torch.zeros(8, 512, 704, dtype=BF16)
    odd = torch.zeros(8 * 512 * 704 + 1, dtype=BF16)[1:].view(8, 512, 704)
    assert hopper_products.multiplies(x, weight, weight)
    assert not hopper_products.multiplies(x, odd) and not hopper_products.multiplies(x, weight, odd)
    assert not hopper_products.multiplies(x[:0], weight)
    assert not hopper_products.multiplies(x.float(), weight.float())
    assert not hopper_products.multiplies(x[:, :448].contiguous(), weight[:, :448])
    assert not hopper_products.multiplies(torch.zeros(600, 520, dtype=BF16), weight)
    assert not hopper_products.multiplies(x, weight[..., :700].contiguous())


def test_experts_use_them_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        calls.append("product")
        return TorchExperts().product(x, weight, offsets)

    def gradient(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        calls.append("gradient")
        return TorchExperts().weight_gradient(a, b, offsets)

    monkeypatch.setattr(hopper_products, "product", product)
    monkeypatch.setattr(hopper_products, "gradient", gradient)
    monkeypatch.setattr(hopper_products, "multiplies", lambda x, *weights: x.shape[1] >= 32)
    monkeypatch.setattr(hopper_products, "differentiates", lambda a, b: a.shape[1] >= 32)
    p = problem([3, 0, 5], hidden=16, inner=32)
    mine = result_and_gradients(p, fused(p, implementation="triton"))
    theirs = result_and_gradients(p, fused(p, implementation="torch"))
    # Over the inner size: down, and from both halves back to the input. Of the gradients, those of both halves.
    assert calls == ["product", "product", "gradient"]
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("capability", "case", "reason"),
    [
        ((9, 0), {}, None),
        ((8, 0), {}, "Hopper, compute capability 9.0, this is 8.0"),
        ((10, 0), {}, "Hopper, compute capability 9.0, this is 10.0"),
        ((9, 0), {"hidden": 256}, "hidden size 256 must be a multiple of 64 and at least 512"),
        ((9, 0), {"hidden": 1000}, "hidden size 1000"),
        ((9, 0), {"biased": True}, "no bias"),
        ((9, 0), {"glu": Glu(interleave=1)}, "alternate every 1"),
    ],
)
def test_refusals(
    capability: tuple[int, int], case: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(hopper_products, "HAS_GLUON", True)
    asked = choose.Case(CUDA, BF16, **{"hidden": 2048, "inner": 1408, **case})
    found = choose.refusal("triton", asked)
    assert (found is None) if reason is None else (found is not None and reason in found)
    assert choose.choose("auto", asked).name == ("triton" if reason is None else "torch")


class Kernel:
    """In place of a kernel: says how it was launched."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, int, int], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.calls.append(("compiled" if options else "direct", grid, args))
            return self

        return run


@pytest.mark.parametrize("direct", [False, True])
def test_a_kernel_is_looked_up_once_for_each_key(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "DIRECT", direct)
    kernel = Kernel()
    launches = launch.Launches(kernel, num_warps=8)
    for key, args in (("a", (1,)), ("b", (2,)), ("a", (3,))):
        launches(key, (4, 1, 1), args, lambda given: (arg + 10 for arg in given))
    third = ("direct", (4, 1, 1), (3,)) if direct else ("compiled", (4, 1, 1), (13,))
    assert kernel.calls == [("compiled", (4, 1, 1), (11,)), ("compiled", (4, 1, 1), (12,)), third]


def test_addresses_and_types_are_in_a_key() -> None:
    x = torch.zeros(16, dtype=BF16)
    keys = {launch.pointers(t) for t in (x, x[1:], x.half(), None)}
    assert len(keys) == 4 and launch.pointers(x) == launch.pointers(x.clone())
