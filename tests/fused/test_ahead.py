"""Kernels of experts are compiled before they are launched: which ones a graph will want, and who compiles them."""

import os
from concurrent.futures import Future
from dataclasses import astuple
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard import _compat, elsewhere
from fxshard.fused.ahead import Gradient, Kernel, Product, Up, compile_ahead, compile_kernel, kernels
from fxshard.fused.dense_op import dense_mlp
from fxshard.fused.glu import SWIGLU
from fxshard.fused.op import grouped_swiglu

EXPERTS, TOKENS, HIDDEN, INNER = 3, 8, 16, 24


def step(name: str, *, turned: bool, joined: bool, weighted: bool) -> fx.Graph:
    """Forward and backward of experts in one graph; ``turned``: weights lie [out, in]."""

    def matrices(rows: int, columns: int) -> torch.Tensor:
        shape = (EXPERTS, columns, rows) if turned else (EXPERTS, rows, columns)
        return torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)

    def run(x: Any, offsets: Any, gate: Any, up: Any, down: Any, weights: Any) -> tuple[torch.Tensor, ...]:
        lying = [each.mT if turned and each is not None else each for each in (gate, up, down)]
        out, _, _ = grouped_swiglu(x, offsets, *lying, None, None, None, weights, *astuple(SWIGLU), False, name)
        return torch.autograd.grad(out.sum(), [each for each in (x, gate, up, down, weights) if each is not None])

    offsets = torch.tensor([2, 2, TOKENS], dtype=torch.int32)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    gate = matrices(HIDDEN, 2 * INNER if joined else INNER)
    up = None if joined else matrices(HIDDEN, INNER)
    weights = torch.rand(TOKENS, requires_grad=True) if weighted else None
    return make_fx(run, tracing_mode="fake")(x, offsets, gate, up, matrices(INNER, HIDDEN), weights).graph


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_what_a_step_launches_is_known_from_its_graph(turned: bool, joined: bool) -> None:
    """Backward multiplies by the same matrices the other way round; all weight gradients are one kernel."""
    found = set(kernels(step("triton", turned=turned, joined=joined, weighted=True)))
    up = Up(EXPERTS, turned, SWIGLU, torch.float32)
    assert found == {up, Product(EXPERTS, turned), Product(EXPERTS, not turned), Gradient()}


def test_without_routing_weights_it_is_another_kernel() -> None:
    found = set(kernels(step("triton", turned=True, joined=False, weighted=False)))
    assert Up(EXPERTS, True, SWIGLU, None) in found


@pytest.mark.parametrize("dense", [nn.Linear(HIDDEN, INNER).weight, nn.Linear(INNER, HIDDEN).weight.t()])
def test_a_dense_mlp_is_known_before_it_is_differentiated(dense: torch.Tensor) -> None:
    """A captured graph has it as a call of ours, a joint one as an operator: the same kernel."""
    x, down = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN, INNER)

    def run(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return dense_mlp(x, gate, up, down, "triton")

    captured = fx.Graph()
    given = [captured.placeholder(name) for name in ("x", "gate", "up", "down")]
    for node, value in zip(given, (x, dense, dense, down), strict=True):
        node.meta["example_value"] = value
    captured.output(captured.call_function(dense_mlp, (*given, "triton")))
    joint = make_fx(run, tracing_mode="fake")(x, dense, dense, down).graph
    assert [*kernels(captured)] == [*kernels(joint)] == [Up(1, dense.stride(-1) == 1, SWIGLU, None)]


def test_other_implementations_launch_none_of_ours() -> None:
    assert not list(kernels(step("torch", turned=True, joined=False, weighted=True)))


class Pool:
    """Stands for Inductor's processes: does at once what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, object, int]] = []

    def submit(self, function: object, cache: str, compile: object, capability: int) -> "Future[None]":
        self.given.append((cache, compile, capability))
        done: Future[None] = Future()
        try:
            done.set_result(function(cache, compile, capability))  # type: ignore[operator]
        except ValueError as error:
            done.set_exception(error)
        return done


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    made = Pool()
    monkeypatch.setattr(_compat, "compile_processes", lambda: ((made,), 2))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("TRITON_CACHE_DIR", "kernels")
    return made


def test_each_kernel_is_given_away_once(pool: Pool) -> None:
    graph = step("triton", turned=True, joined=False, weighted=True)
    with (
        mock.patch("fxshard.fused.hopper_products.compile_product") as product,
        mock.patch.multiple(
            "fxshard.fused.hopper_products", compile_up=mock.DEFAULT, compile_gradient=mock.DEFAULT
        ) as others,
    ):
        begun: set[Kernel] = set()
        for _ in range(2):
            compile_ahead(graph, torch.device("cuda", 0), begun)
    assert len(pool.given) == 4 and {(cache, capability) for cache, _, capability in pool.given} == {("kernels", 90)}
    assert product.call_args_list == [mock.call(EXPERTS, True, 90), mock.call(EXPERTS, False, 90)]
    others["compile_up"].assert_called_once_with(EXPERTS, True, SWIGLU, torch.float32, 90)
    others["compile_gradient"].assert_called_once_with(90)


def test_it_is_compiled_where_launches_look(pool: Pool) -> None:
    seen: list[tuple[str | None, int]] = []
    elsewhere.compile_elsewhere(
        lambda capability: seen.append((os.environ.get("TRITON_CACHE_DIR"), capability)), torch.device("cuda", 0)
    )
    assert seen == [("kernels", 90)]


def test_a_failure_is_told_and_holds_up_nothing(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    def compile(capability: int) -> None:
        raise ValueError("no such kernel")

    with caplog.at_level("DEBUG", logger="fxshard"):
        elsewhere.compile_elsewhere(compile, torch.device("cuda", 0))
    assert "no such kernel" in caplog.text


def test_without_processes_nothing_is_compiled() -> None:
    """As on this machine; nothing asks for a GPU."""
    elsewhere.compile_elsewhere(partial(compile_kernel, Gradient()), torch.device("cuda", 0))
