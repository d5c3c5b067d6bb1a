"""A second start traces nothing and comes to the same, to the bit; wherever that is not sure, it traces."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxshard
from fxshard import _compat, backend, captured_graph
from fxshard.fused import choose
from fxshard.fused.by_torch import TorchExperts
from fxshard.helpers import beside
from fxshard.inspect.schedule import Schedule
from fxshard.lowering import once_each
from fxshard.passes.pipeline import PASSES
from fxshard.plan.memory import MemoryPlan
from fxshard.remembered import graphs, store
from fxshard.remembered import recall as recalling
from fxshard.remembered.surroundings import surroundings
from fxshard.scheduled import Scheduled
from tests.pool import Pool, forget
from tests.remembered.starts import Deep, Start, same, start, uncompiled
from tests.thorough import thorough


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with nothing in it, that is used."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FXSHARD_REMEMBER", "1")
    return tmp_path / "fxshard"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Start, Path, str]:
    """A start of one step, the cache that it left, and what was around it."""
    path = tmp_path_factory.mktemp("earlier")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(path))
        patch.setenv("FXSHARD_REMEMBER", "1")
        return start(steps=1), path, surroundings()


@pytest.fixture
def first(cache: Path, earlier: tuple[Start, Path, str]) -> Start:
    """That start, with a cache that knows it. Nothing has changed since: the same start would be recalled."""
    done, path, around = earlier
    shutil.copytree(path / "fxshard", cache)
    assert done.traced and len(kept(cache)) == 1 and surroundings() == around
    return done


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.graphs"))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_second_start_traces_nothing_and_is_the_same(cache: Path, dropout: float) -> None:
    make = functools.partial(Deep, dropout=dropout)
    first, second = start(make), start(make)
    assert first.traced and not second.traced and first.left_out == 2
    assert same(first, second)
    assert len(kept(cache)) == 1


def test_it_is_what_a_start_without_memory_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    recalled = start()
    monkeypatch.setenv("FXSHARD_REMEMBER", "0")
    plain = start(trace_once=False)
    assert all(torch.equal(a, b) for a, b in zip(recalled.left, plain.left, strict=True))
    assert (recalled.schedules, recalled.graphs) == (plain.schedules, plain.graphs)


def test_nothing_is_kept_or_recalled_where_that_is_not_wanted(
    first: Start, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXSHARD_REMEMBER", "0")
    assert start(steps=1).traced
    for path in kept(cache):
        path.unlink()
    assert start(steps=1).traced and not kept(cache)


@pytest.mark.parametrize(
    "options",
    [
        {"make": functools.partial(Deep, layers=7)},
        thorough({"make": functools.partial(Deep, width=16), "shape": (4, 16)}),
        thorough({"make": functools.partial(Deep, dropout=0.5)}),
        thorough({"shape": (5, 8)}),
        thorough({"prefetch": 0}),
        thorough({"keep_resident": False}),
        {"precision": fxshard.Precision(param=torch.bfloat16)},
        thorough({"units": ["norm"]}),
        thorough({"optimizer": fxshard.Muon(lr=1e-2)}),
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_program_is_not_taken_for_this_one(first: Start, options: dict[str, Any]) -> None:
    other = start(steps=1, **options)
    assert other.traced
    again = start(steps=1, **options)
    assert not again.traced and same(other, again)


class Frozen(Deep):
    """As Deep, with one layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


class Rearranged(Deep):
    """The parameters of Deep, and another model."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).sigmoid()
        return self.norm(x).square().mean()


@pytest.mark.parametrize("make", [Frozen, Rearranged])
def test_another_model_with_the_same_parameters_is_not_taken_for_this_one(first: Start, make: Any) -> None:
    assert start(make, steps=1).traced


def precision_of_products() -> Callable[[], None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    torch.set_float32_matmul_precision("high")

    def undo() -> None:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before  # by its newer name it was not set at all

    return undo


def deterministic() -> Callable[[], None]:
    torch.use_deterministic_algorithms(True)
    return lambda: torch.use_deterministic_algorithms(False)


def attention() -> Callable[[], None]:
    torch.backends.cuda.enable_math_sdp(False)
    return lambda: torch.backends.cuda.enable_math_sdp(True)


def partitioner() -> Callable[[], None]:
    patched = torch._functorch.config.patch(activation_memory_budget=0.5)
    patched.__enter__()
    return lambda: patched.__exit__(None, None, None)


def inductor() -> Callable[[], None]:
    patched = torch._inductor.config.patch(joint_graph_constant_folding=False)
    patched.__enter__()
    return lambda: patched.__exit__(None, None, None)


@pytest.fixture(params=[precision_of_products, thorough(deterministic), attention, partitioner, thorough(inductor)])
def setting(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Sets something that traced graphs depend on, until the test is over."""
    undo: list[Callable[[], None]] = []
    yield lambda: undo.append(request.param())
    for each in undo:
        each()


def test_another_setting_of_torch_is_another_program(first: Start, setting: Callable[[], None]) -> None:
    setting()
    assert start(steps=1).traced


def halved(x: Tensor) -> Tensor:
    return torch.ops.aten.mul(x, 0.5)


def test_a_decomposition_of_the_programs_own_is_not_recalled(first: Start, cache: Path) -> None:
    """Nobody could tell whether it is the same at the next start."""
    table = dict(_compat.inductor_decompositions())
    table[torch.ops.aten.tanh.default] = halved
    with mock.patch("torch._inductor.decomposition.select_decomp_table", lambda: table):
        assert start(steps=1).traced
    assert len(kept(cache)) == 1


def test_passes_of_the_programs_own_are_not_recalled(cache: Path) -> None:
    passes = PASSES.after("insert_unshard", lambda module, context: module)
    assert start(steps=1, passes=passes).traced
    assert not kept(cache)


def test_hooks_of_the_programs_own_are_not_recalled(cache: Path) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        start(steps=1)
    assert not kept(cache)


def test_a_profile_is_not_recalled(cache: Path) -> None:
    """Durations are never the same again: each would leave a file that nobody finds."""
    with mock.patch.object(_compat, "inductor_compile", uncompiled):
        model = fxshard.compile(Deep(), lowering="inductor")
        with model.profile(steps=1) as profile:
            model(torch.ones(4, 8)).backward()
        model.reschedule(profile)
        model(torch.ones(4, 8)).backward()
    assert len(kept(cache)) == 1


class Mine(TorchExperts):
    """An implementation of the user's own."""


def test_experts_of_the_programs_own_are_not_recalled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they ask for is part of the graph."""
    monkeypatch.setitem(choose._MAKE, "mine", Mine)
    monkeypatch.setitem(choose._REFUSALS, "mine", lambda case: None)
    assert start(steps=1, experts="mine").traced and not kept(cache)
    assert start(steps=1, experts="torch").traced and len(kept(cache)) == 1


def test_whoever_watches_sees_everything(first: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSHARD_DUMP", str(tmp_path / "seen"))
    assert start(steps=1).traced


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at:][1:]


DAMAGES = {
    "short": lambda data: data[:-10],
    "empty": lambda data: b"",
    "a segment": lambda data: changed(data, len(data) // 4),
    "a graph, which is read when somebody asks for it": lambda data: changed(data, len(data) - 100),
}


@pytest.mark.parametrize("damage", [each if "read" in name else thorough(each) for name, each in DAMAGES.items()])
def test_a_damaged_file_is_traced_and_written_again(
    first: Start, cache: Path, damage: Callable[[bytes], bytes]
) -> None:
    (path,) = kept(cache)
    path.write_bytes(damage(path.read_bytes()))
    second, third = start(steps=1), start(steps=1)
    assert second.traced and not third.traced
    assert same(first, second) and same(first, third)


def test_what_was_recorded_is_verified_again(first: Start) -> None:
    with mock.patch.object(Schedule, "verify") as verify:
        assert not start(steps=1).traced
    verify.assert_called_once_with()


def test_it_is_written_behind_the_first_step(cache: Path) -> None:
    """Of an optimizer of ours: until then the thread that writes would slow it down."""
    model = fxshard.compile(Deep(), optimizer=fxshard.AdamW(), lowering="inductor")
    with mock.patch.object(_compat, "inductor_compile", uncompiled):
        model(torch.ones(4, 8)).backward()
    beside.finish_all()
    assert not kept(cache)
    model.optimizer.step()
    beside.finish_all()
    assert kept(cache)


def test_with_another_optimizer_it_is_written_behind_backward(cache: Path) -> None:
    model = fxshard.compile(Deep(), lowering="inductor")
    with mock.patch.object(_compat, "inductor_compile", uncompiled):
        model(torch.ones(4, 8)).backward()
    beside.finish_all()
    assert kept(cache)


@pytest.mark.parametrize("recalled", [False, True])
def test_a_model_that_takes_no_step_is_dropped_as_ever(recalled: bool) -> None:
    if recalled:
        start(steps=1, optimizer=fxshard.AdamW())
    forget()
    model = fxshard.compile(Deep(), optimizer=fxshard.AdamW(), lowering="inductor")
    with (
        mock.patch.object(_compat, "inductor_compile", uncompiled),
        mock.patch.object(backend, "abridge", wraps=backend.abridge) as abridge,
    ):
        model(torch.ones(4, 8)).backward()
    assert abridge.called is not recalled
    abridge.reset_mock()  # which keeps what it was called with
    left = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    torch._dynamo.reset()
    gc.collect()
    assert not any(each() is not None for each in left)


@pytest.mark.parametrize("entered", [torch.inference_mode, thorough(lambda: torch.device("meta"))])
def test_graphs_are_read_in_whatever_mode_they_are_looked_at(entered: Callable[[], Any]) -> None:
    start(steps=1)
    forget()
    model = fxshard.compile(Deep(), optimizer=fxshard.AdamW(lr=1e-2), lowering="inductor")
    with mock.patch.object(_compat, "inductor_compile", uncompiled):
        model(torch.ones(4, 8)).backward()
    with mock.patch.object(graphs, "loads", wraps=graphs.loads) as loads, entered():
        values = [node.meta["val"] for node in model.graphs["forward"].graph.find_nodes(op="placeholder")]
    assert loads.call_count == 1
    assert not any(value.is_inference() or value.device.type != "cpu" for value in values)


def test_segments_are_kept_once_and_graphs_read_when_looked_at(cache: Path) -> None:
    """What runs are segments, of which layers that are alike have the same, and Inductor writes to what it is given."""

    def compiles(segment: fx.GraphModule, inputs: Any) -> Any:
        run = uncompiled(fx.GraphModule(segment, deepcopy(segment.graph)), inputs)
        for node in segment.graph.find_nodes(op="output"):
            segment.graph.erase_node(node)
        return run

    def train() -> tuple[fxshard.ShardedModule, int]:
        forget()
        model = fxshard.compile(Deep(), optimizer=fxshard.AdamW(), lowering="inductor", keep_resident=False)
        with (
            mock.patch.object(_compat, "inductor_compile", side_effect=compiles) as inductor,
            mock.patch.object(graphs, "loads", wraps=graphs.loads) as loads,
        ):
            model(torch.ones(4, 8)).backward()
            model.optimizer.step()
            beside.finish_all()
            assert model.compilations.compiled >= inductor.call_count > 0
            return model, loads.call_count

    (first, none), (second, one) = train(), train()
    assert (none, one) == (0, 1), "the second has not read whole graphs"
    assert first.compilations == second.compilations and first.compilations.segments > first.compilations.compiled
    assert str(first.schedule) == str(second.schedule)
    texts = [{phase: str(graph.graph) for phase, graph in model.graphs.items()} for model in (first, second)]
    assert texts[0] == texts[1]


class Times(nn.Module):
    """A frozen product with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) / 2, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Mirrored(nn.Module):
    """Backward multiplies by a matrix as forward does, and by a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Linear(8, 8), Times(), nn.Linear(8, 8, bias=False).requires_grad_(False))
        self.layers = nn.ModuleList(nn.Sequential(*map(deepcopy, parts)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def test_what_forward_and_backward_have_in_common_is_kept_once(cache: Path) -> None:
    shared = mock.patch.object(captured_graph, "once_each", wraps=once_each)
    options: dict[str, Any] = {"steps": 1, "keep_resident": False, "units": ["layers.*.*"]}
    with shared as kept_once:
        first, second = start(Mirrored, **options), start(Mirrored, **options)
    forward, backward = once_each(kept_once.call_args.args[0]).values()
    assert set(forward.children()) & set(backward.children()), "or this shows nothing"
    assert first.traced and not second.traced and same(first, second)


def test_segments_of_two_graphs_are_shared() -> None:
    """Or forward and backward could not be kept with each other where they have one in common."""

    def split(*calls: Any) -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        parts = {f"segment_{i}": make_fx(call)(torch.ones(2)) for i, call in enumerate(calls)}
        for name in parts:
            x = graph.create_node("call_module", name, (x,))
        graph.output(x)
        return fx.GraphModule(parts, graph)

    one, other = split(torch.sin, torch.cos, torch.sin), split(torch.exp, torch.sin)
    found = once_each({1: one, 2: other})
    assert found[1].segment_0 is found[1].segment_2 is found[2].segment_1 is one.segment_0
    assert found[1].segment_1 is one.segment_1 and found[2].segment_0 is other.segment_0
    assert len(recalling._segments(Scheduled({}, MemoryPlan({}, 0), splits=found))) == 3  # type: ignore[dict-item]


def test_what_does_not_fit_is_traced_and_forgotten(first: Start, cache: Path) -> None:
    """Were a key too short, AOTAutograd's look at inputs and outputs would tell; layers are then traced once."""
    (path,) = kept(cache)
    with mock.patch.object(captured_graph, "fits", side_effect=[False, True]):
        second = start(steps=1)
    assert second.traced and second.left_out == 2 and same(first, second)
    assert kept(cache) == [path] and not start(steps=1).traced


def test_a_damaged_file_that_cannot_be_removed_is_no_failure(
    first: Start, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError("read-only file system")

    kept(cache)[0].write_bytes(b"nonsense")
    monkeypatch.setattr(Path, "unlink", denied)
    assert same(first, start(steps=1))


def test_a_disk_that_cannot_be_written_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, data: bytes) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(store, "write", full)
    assert same(start(steps=1), start(steps=1))


def on_ranks(path: str, make: Any, **options: Any) -> Any:
    environment = {"TORCHINDUCTOR_CACHE_DIR": path, "FXSHARD_REMEMBER": "1"}
    with mock.patch.dict(os.environ, environment):
        first, second = start(make, steps=1, **options), start(make, steps=1, **options)
    return first.traced, second.traced, same(first, second)


@pytest.mark.parametrize("options", [{"zero": 3}, thorough({"zero": 2, "optimizer": fxshard.Muon(lr=1e-2)})])
def test_ranks_recall_alike(ranks: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    done = ranks(2, on_ranks, str(tmp_path), Deep, **options)
    assert any(first for first, _, _ in done)  # one may find what the other has just kept
    assert all(not second and equal for _, second, equal in done)
