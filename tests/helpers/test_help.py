"""What a crew is sent, what comes of it, and what this process does itself."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxshard
from fxshard import _compat, elsewhere, lowering
from fxshard.helpers import crew
from fxshard.helpers.crew import Crew
from fxshard.helpers.packing import compile_packed, packed
from fxshard.lowering import SegmentCompiler, structure
from fxshard.remembered import graphs
from tests.helpers.crews import ASLEEP, living, ready, until
from tests.toy import Mlp

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]


@dataclass
class Idle:
    """Stands for a crew of which so many are there, and do nothing."""

    there: int = 0
    jobs: list[Any] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    waited_for: set[int] = field(default_factory=set)
    queues: list[str] = field(default_factory=list)
    practises: bool = True

    def publish(self, job: Any, *, wanted: bool = True, queue: str = crew.QUEUE) -> int:
        self.jobs.append(job)
        self.queues.append(queue)
        self.open.add(len(self.jobs) - 1)
        return len(self.jobs) - 1

    def withdraw(self, number: int) -> None:
        self.open.remove(number)

    def withdraw_unwanted(self) -> None:
        self.practises = False

    def present(self) -> int:
        return self.there

    def finish(self, *, but: Collection[int] = ()) -> None:
        self.waited_for = self.open.difference(but)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of Inductor's with nothing in it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def example(cache: Path) -> Iterator[torch.Tensor]:
    """An input of segments, while Dynamo compiles."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        made = torch.empty(4, 4)
    with tracing(TracingContext(mode)):
        yield made


def segment(example: torch.Tensor, length: int) -> fx.GraphModule:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(length):
            x = x.sin()
        return [x]

    return make_fx(run)(example)


def helped(compiler: SegmentCompiler, crew: Any, segments: list[fx.GraphModule]) -> None:
    """Hand segments out and wait for them, as a model with nothing else to do meanwhile would."""
    compiler.hand_out(crew, [segments])
    compiler.finish(crew, segments)


def compiles(graph: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
    """Stands for Inductor, which writes to graphs."""
    count = len(graph.graph.nodes)
    for node in graph.graph.find_nodes(op="output"):
        graph.graph.erase_node(node)
    return lambda args: count


def test_what_nobody_is_there_for_is_compiled_here(example: torch.Tensor) -> None:
    """Once, the shortest first; what is not ours among the jobs is left to whoever launches it."""
    segments = [segment(example, length) for length in (1, 3, 2, 3)]
    idle, compiler = Idle(), SegmentCompiler("inductor")
    idle.publish("a kernel")
    with mock.patch.object(_compat, "inductor_compile", side_effect=compiles) as inductor:
        helped(compiler, idle, segments)
        assert len(idle.jobs) == 4 and idle.open == {0}
        assert [len(call.args[0].graph.nodes) for call in inductor.call_args_list] == [2, 3, 4]  # without the output
        assert compiler.compilations == 3 and compiler.segments == 0
        assert [compiler(each)([]) for each in segments] == [3, 5, 4, 5]
        helped(compiler, idle, segments)
    assert compiler.compilations == 3 and compiler.segments == 4 and len(idle.jobs) == 4


@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (3, 0), (8, 0)])
def test_what_others_are_there_for_is_left_to_them(example: torch.Tensor, there: int, here: int) -> None:
    """Kernels, which were asked for earlier, are nothing that could be done here."""
    segments = [segment(example, length) for length in (1, 2, 3)]
    busy, compiler = Idle(there), SegmentCompiler("inductor")
    kernel = busy.publish("a kernel")
    with mock.patch.object(_compat, "inductor_compile", side_effect=compiles):
        helped(compiler, busy, segments)
        assert len(busy.jobs) == 4 and len(busy.open - {kernel}) == 3 - here and compiler.compilations == here
        assert [compiler(each)([]) for each in segments] == [3, 4, 5]
    assert compiler.compilations == 3


def test_a_forward_waits_for_its_own_segments_and_for_kernels(example: torch.Tensor) -> None:
    """Which are handed out first. Those of backward have time until forward has run."""
    forward, backward = [segment(example, 1), segment(example, 2)], [segment(example, 3), segment(example, 4)]
    busy, compiler = Idle(8), SegmentCompiler("inductor")
    kernel = busy.publish("a kernel")
    compiler.hand_out(busy, [forward, [*backward, *forward]])  # type: ignore[arg-type]
    compiler.hand_out(busy, [backward])  # type: ignore[arg-type]
    assert len(busy.jobs) == 5 and not busy.waited_for and not busy.practises
    compiler.finish(busy, forward[:1])  # type: ignore[arg-type]
    assert busy.waited_for == {kernel, 2}  # the longest first
    compiler.finish(busy, forward)  # type: ignore[arg-type]
    assert busy.waited_for == {kernel, 1, 2}
    compiler.finish(busy, backward[1:])  # type: ignore[arg-type]
    assert busy.waited_for == {kernel, 3}


def test_what_others_have_done_meanwhile_is_not_compiled_here(example: torch.Tensor) -> None:
    """One of the crew does the shortest of three, while another is at none."""

    class Quick(Idle):
        def present(self) -> int:
            self.open.discard(2)
            return self.there

    quick, compiler = Quick(1), SegmentCompiler("inductor")
    with mock.patch.object(_compat, "inductor_compile", side_effect=compiles) as inductor:
        helped(compiler, quick, [segment(example, length) for length in (1, 2, 3)])
    assert [len(call.args[0].graph.nodes) for call in inductor.call_args_list] == [3] and quick.open == {0}


def test_what_cannot_be_packed_is_compiled_later(example: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "packed", lambda segment: None)
    idle, compiler = Idle(), SegmentCompiler("inductor")
    with mock.patch.object(_compat, "inductor_compile", side_effect=compiles):
        helped(compiler, idle, [segment(example, 2)])
        assert not idle.jobs and compiler.compilations == 0
        assert compiler(segment(example, 2))([]) == 4
    assert compiler.compilations == 1


def test_what_was_compiled_earlier_needs_no_help(example: torch.Tensor) -> None:
    """By another program: it is in Inductor's cache."""
    idle = Idle()
    with mock.patch.object(_compat, "inductor_compile", side_effect=compiles):
        SegmentCompiler("inductor")(segment(example, 2))
        helped(SegmentCompiler("inductor"), idle, [segment(example, 2), segment(example, 3)])
    assert len(idle.jobs) == 1


def test_what_was_packed_is_compiled_as_it_would_be_here(example: torch.Tensor) -> None:
    """The same graph, for the same inputs, under the same options; all of it travels."""
    found = []

    def compile(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        found.append((structure(graph), [(x.shape, x.stride()) for x in inputs], config.max_autotune))

    data = packed(segment(example, 3))
    assert data is not None
    with config.patch(max_autotune=True):
        job = pickle.dumps(partial(compile_packed, data, _compat.compile_circumstances()))
    with mock.patch.object(_compat, "inductor_compile", compile):
        pickle.loads(job)()
    assert found == [(structure(segment(example, 3)), [(example.shape, example.stride())], True)]


def test_what_nodes_say_travels(example: torch.Tensor) -> None:
    """Inductor keeps the strides of outputs that are declared visible, and its cache does not look at that."""
    graph, found = segment(example, 2), []
    graph.graph.output_node().meta["user_visible_output_idxs"] = [0]
    for node in graph.graph.nodes:
        node.meta["nn_module_stack"] = {"1": ("L['model']", Mlp)}
    data = packed(graph)
    circumstances = _compat.compile_circumstances()
    assert data is not None and circumstances is not None
    with mock.patch.object(_compat, "inductor_compile", lambda graph, inputs: found.append(graph)):
        compile_packed(data, circumstances)
    (arrived,) = found
    assert arrived.graph.output_node().meta["user_visible_output_idxs"] == [0]
    for sent, got in zip(graph.graph.nodes, arrived.graph.nodes, strict=True):
        assert got.name == sent.name and set(got.meta) == set(sent.meta) - graphs.LEFT_BEHIND


@pytest.mark.parametrize(
    ("kept", "why"), [(lambda node: lambda: None, "lambda"), (lambda node: node, "refers to")], ids=["lambda", "node"]
)
def test_a_segment_that_cannot_travel_is_told_of(
    example: torch.Tensor, caplog: pytest.LogCaptureFixture, kept: Any, why: str
) -> None:
    stuck = segment(example, 1)
    for node in stuck.graph.find_nodes(op="placeholder"):
        node.meta["something"] = kept(node)
    with caplog.at_level("DEBUG", logger="fxshard"):
        assert packed(stuck) is None
    assert "cannot be compiled ahead" in caplog.text and why in caplog.text


def test_nor_does_one_that_calls_a_function_of_python(example: torch.Tensor) -> None:
    """One that is no operator, as libraries register them with Inductor."""
    stuck = segment(example, 1)
    for node in stuck.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.target = compiles
    assert packed(stuck) is None


def test_options_that_cannot_travel_hold_up_nothing(example: torch.Tensor) -> None:
    """Inductor keeps nothing in its cache then, and compiles."""
    compiler = SegmentCompiler("inductor")
    with (
        config.patch(reorder_for_compute_comm_overlap_passes=[lambda nodes: nodes]),
        mock.patch.object(_compat, "inductor_compile", side_effect=compiles),
    ):
        helpers = Crew(1, command=("-c", ASLEEP))
        helped(compiler, helpers, [segment(example, 1)])
        helpers.dismiss()
        assert not helpers.open and compiler.compilations == 0
        assert compiler(segment(example, 1))([]) == 3


@pytest.mark.parametrize("option", [{}, {"fx_graph_cache": False}, {"force_disable_caches": True}])
def test_nothing_travels_without_a_cache(example: torch.Tensor, option: dict[str, bool]) -> None:
    """This process would not find what comes of it."""
    with config.patch(option):
        assert (packed(segment(example, 1)) is None) == bool(option)


def test_nothing_of_the_script_travels(example: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes are not there in another process, whose main module is another one."""
    model = type("Model", (torch.nn.Module,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Model", model, raising=False)
    graph = segment(example, 1)
    for node in graph.graph.nodes:  # as in backward graphs of a model that the script defines
        node.meta["fwd_nn_module_stack"] = {"1": ("L['model']", model)}
    data = packed(graph)
    assert data is not None and b"__main__" not in data


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that multiprocessing has spawned: pickle takes the first module that has ``torch``."""
    main = mock.Mock(spec=["torch"], torch=torch)
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    monkeypatch.setattr(sys, "modules", {"__mp_main__": main, **sys.modules})


def laid_out(example: torch.Tensor) -> fx.GraphModule:
    return make_fx(lambda x: [x.t().clone(memory_format=torch.contiguous_format)])(example)


def test_what_torch_names_is_not_looked_for_in_the_script(example: torch.Tensor, script: None) -> None:
    data = packed(laid_out(example))
    assert data is not None and b"__mp_main__" not in data


def test_others_know_what_they_compile_by_the_same_key(example: torch.Tensor, request: pytest.FixtureRequest) -> None:
    """Or this process does not find it, and all was in vain."""
    theirs, _ = compiled_fx_graph_hash(laid_out(example), [example], {}, [])
    request.getfixturevalue("script")
    ours, _ = compiled_fx_graph_hash(laid_out(example), [example], {}, [])
    assert ours == theirs


def test_memory_formats_can_be_read_without_us() -> None:
    for value in (torch.contiguous_format, torch.channels_last, torch.preserve_format):
        pickled = pickle.dumps(value)
        assert b"fxshard" not in pickled and pickle.loads(pickled) is value


def test_kernels_go_to_the_crew_while_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, int]] = []
    idle = Idle()
    monkeypatch.setattr(crew, "hired", lambda: idle)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("TRITON_CACHE_DIR", "kernels")
    elsewhere.compile_elsewhere(
        lambda capability: seen.append((os.environ.get("TRITON_CACHE_DIR"), capability)), torch.device("cuda", 0)
    )
    (job,) = idle.jobs
    assert not seen and idle.queues == [crew.KERNELS]
    job()
    assert seen == [("kernels", 90)]


def step(path: Path) -> None:
    """A program that trains: says what came of its first step, and of its crew."""
    compile = fxshard.compile
    helpers = crew.hired()
    if helpers is not None:
        ready(helpers, path, seconds=90)
    torch.manual_seed(0)
    model = compile(Mlp(), lowering="inductor", zero=3)
    loss = model(torch.randn(4, 7), torch.randn(4, 5))
    loss.backward()
    assert crew.hired() is None
    if helpers is not None:
        until(lambda: not living(helpers._process.pid), seconds=10)
    grads = b"".join(parameter.grad.numpy().tobytes() for parameter in model.parameters())
    bits = f"{float(loss.detach()).hex()} {hashlib.sha256(grads).hexdigest()}"
    hits, misses = (counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss"))
    done = helpers.finished if helpers is not None else 0
    print(json.dumps([bits, done, hits, misses, model.compilations.compiled]))


@dataclass(frozen=True)
class Step:
    """What such a program says."""

    bits: str
    done: int
    """Jobs that the crew has done, the first of which shows that it is there."""
    hits: int
    misses: int
    compiled: int


def steps(folder: Path, *counts: int) -> list[Step]:
    """Run such programs side by side, each with so many helpers and a cache of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = "import sys; from tests.helpers.test_help import Path, step; step(Path(sys.argv[1]))"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder / f"ready{count}")],
            env={**environment, "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache{count}"), crew.VARIABLE: str(count)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for count in counts
    ]
    try:
        said = [each.communicate()[0] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0] * len(counts)
    return [Step(*json.loads(text)) for text in said]


@pytest.mark.timeout(180)
def test_a_step_is_the_same_with_help(tmp_path: Path) -> None:
    """To the bit; some of it comes out of the cache, and nobody is left when it has come."""
    helped, alone = steps(tmp_path, 2, 0)
    assert helped.bits == alone.bits
    assert alone.hits == 0 and alone.misses == alone.compiled == helped.compiled >= 3
    assert helped.done >= 2 and helped.hits >= 1
    assert helped.hits + helped.misses == helped.compiled


@pytest.mark.timeout(180)
@pytest.mark.thorough
def test_a_later_run_asks_for_no_help(tmp_path: Path) -> None:
    """All that it compiles is in the cache, and it knows."""
    (first,) = steps(tmp_path, 2)
    (tmp_path / "ready2").unlink()
    (later,) = steps(tmp_path, 2)
    assert later.bits == first.bits
    assert later.done == 1 and later.misses == 0 and later.hits == later.compiled == first.compiled
