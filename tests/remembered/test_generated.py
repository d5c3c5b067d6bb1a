"""Code that Inductor wrote is loaded without its compiler; wherever more than that is to be done, it is compiled as
ever."""

from __future__ import annotations

import ast
import logging
import pickle
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import codecache
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.triton_bundler import TritonBundler
from torch._logging._internal import LazyTraceHandler
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard import _compat, lowering
from fxshard._compat.generated import Generated, lighter_imports
from fxshard.helpers.packing import example_inputs
from fxshard.lowering import SegmentCompiler, structure

IMPORTED = "import torch as extern_kernels"
"""In place of what imports the compiler."""
CODE = """
import torch
from torch._inductor.codegen.memory_planning import _align as align
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
async_compile = AsyncCompile()
def call(args):
    extern_kernels.mm(args[0], args[1], out=args[2])
"""


def lighter(code: str) -> dict[int, str]:
    return lighter_imports(code, ast.parse(code))


def test_what_is_not_used_is_not_imported_and_products_are_torchs() -> None:
    assert lighter(CODE) == {2: "", 4: IMPORTED}


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        ("call(args):", "call(args, size=align(8)):", {4: IMPORTED}),
        ("extern_kernels.mm", "extern_kernels._mm_plus_mm", {2: ""}),
        ("extern_kernels.mm", "extern_kernels.does_not_exist", {2: ""}),
        ("extern_kernels.mm(", "print(extern_kernels, ", {2: ""}),
        ("extern_kernels\n", "extern_kernels, autotune_select_algorithm\n", {2: ""}),
        ("_align as align", "(\n    _align as align\n)", {6: IMPORTED}),
        ("_align as align", "_align as align; a = 1", {4: IMPORTED}),
        ("from torch._inductor.codegen", "from somewhere.codegen", {4: IMPORTED}),
    ],
)
def test_all_else_is_left_alone(old: str, new: str, left: dict[int, str]) -> None:
    import torch._inductor.compile_fx  # noqa: F401  # where functions are given to the namespace

    assert lighter(CODE.replace(old, new)) == left


def test_a_function_that_is_not_torchs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.select_algorithm import extern_kernels

    monkeypatch.setattr(extern_kernels, "mm", lambda *args, **kwargs: None, raising=False)
    assert lighter(CODE) == {2: ""}


def traced(function: Any, *shapes: tuple[int, ...]) -> fx.GraphModule:
    with _compat.current_fake_mode():
        return make_fx(function)(*map(torch.empty, shapes))


def segment() -> fx.GraphModule:
    return traced(lambda x, y: (torch.mm(x, y),), (4, 8), (8, 2))


def under() -> str:
    """The circumstances, which can be told here."""
    found = lowering._circumstances()
    assert found is not None
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def made(cache: Path) -> Iterator[Generated]:
    """What a cache has for a product."""
    graph = segment()
    found = _compat.generated(_compat.inductor_compile(graph, example_inputs(graph)), under())
    assert found is not None and IMPORTED in [line for _, line in found.lines]
    counters.clear()
    yield found
    counters.clear()


def load(found: Generated) -> Any:
    return _compat.load_generated(found, example_inputs(segment()))


def test_it_is_loaded_and_computes_the_same(made: Generated) -> None:
    x, y = torch.randn(4, 8), torch.randn(8, 2)
    run = load(made)
    assert torch.equal(run([x, y])[0], x @ y)
    assert IMPORTED in run.source_code and "memory_planning" not in run.source_code
    assert run.current_callable.__globals__["extern_kernels"] is torch
    assert run._fx_graph_cache_key == made.key and counters["inductor"]["fxgraph_cache_hit"] == 1


def test_it_needs_nothing_that_others_have_imported(made: Generated, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded looks for that module when it is called."""
    monkeypatch.delitem(sys.modules, "torch._inductor.debug", raising=False)
    monkeypatch.delattr(torch._inductor, "debug", raising=False)
    x, y = torch.randn(4, 8), torch.randn(8, 2)
    assert torch.equal(load(made)([x, y])[0], x @ y)


def test_whoever_compiles_around_it_is_told_nothing(made: Generated) -> None:
    context = TracingContext(None)
    context.output_strides = []
    with tracing(context):
        load(made)
    assert context.output_strides == []


def test_kernels_that_lie_with_it_are_put_where_they_are_looked_for(made: Generated, cache: Path) -> None:
    forge(cache, _triton_bundle="kernels")
    left = mock.patch.dict(CompiledTritonKernels._cache, {"future": mock.Mock()})
    with left, mock.patch.object(TritonBundler, "read_and_emit") as emit:
        assert load(made) is not None
        assert not CompiledTritonKernels._cache
    emit.assert_called_once_with("kernels")


def test_whoever_takes_the_cache_along_has_it_too(made: Generated) -> None:
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache():
        load(made)
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None and saved[1].inductor_artifacts == [made.key]


SETTINGS: list[dict[str, Any]] = [
    {"fx_graph_cache": False},
    {"force_disable_caches": True},
    {"bundled_autotune_remote_cache": True},
    {"triton.cudagraphs": True},
    *([{"cudagraph_policy": object()}] if hasattr(torch._inductor.config, "cudagraph_policy") else []),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: next(iter(setting)))
def test_it_is_not_loaded_where_more_is_to_be_done(made: Generated, setting: dict[str, Any]) -> None:
    with torch._inductor.config.patch(setting):
        assert load(made) is None
    assert load(made) is not None


def test_whoever_watches_sees_inductors_code(made: Generated, tmp_path: Path) -> None:
    with mock.patch.object(codecache.output_code_log, "isEnabledFor", lambda level: True):
        assert load(made) is None
    with mock.patch("torch._inductor.graph.GraphLowering.save_output_code", print):
        assert load(made) is None
    trace = LazyTraceHandler(str(tmp_path))
    logging.getLogger("torch.__trace").addHandler(trace)
    try:
        assert load(made) is None
    finally:
        logging.getLogger("torch.__trace").removeHandler(trace)
    assert load(made) is not None


def test_it_is_not_loaded_without_the_operators_that_it_calls(made: Generated) -> None:
    assert load(replace(made, operators=("fxshard::no_such_operator",))) is None


def test_operators_that_python_code_defines_are_noted() -> None:
    with torch.library._scoped_library("fxshard_test", "DEF") as library:
        library.define("mine(Tensor x) -> Tensor")
        library.impl("mine", lambda x: x + 1, "CompositeExplicitAutograd")
        library.impl("mine", torch.empty_like, "Meta")
        graph = traced(lambda x: (torch.ops.fxshard_test.mine(x),), (4,))
        found = _compat.generated(_compat.inductor_compile(graph, example_inputs(graph)), "")
    assert found is not None and found.operators == ("fxshard_test::mine",)


def entries(cache: Path) -> list[Path]:
    return [path for path in (cache / "fxgraph").rglob("*") if path.is_file()]


def forge(cache: Path, **attributes: Any) -> None:
    """Let the one entry of Inductor's cache say something else."""
    (path,) = entries(cache)
    graph = pickle.loads(path.read_bytes())
    for name, value in attributes.items():
        setattr(graph, name, value)
    path.write_bytes(pickle.dumps(graph))


@pytest.mark.parametrize(
    "attributes",
    [
        {"extern_libs_key": "of another machine"},  # which torch 2.13 notes
        {"guards_expr": "L['s0'] == 4"},
        {"frozen_param_names": {"a": "b"}},
        {"source_code": CODE.replace("mm", "bias_addmm")},  # what tuning may choose at another time
    ],
    ids=lambda attributes: next(iter(attributes)),
)
def test_another_entry_is_not_loaded(made: Generated, cache: Path, attributes: dict[str, Any]) -> None:
    forge(cache, **attributes)
    assert load(made) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's, of what it cannot read
@pytest.mark.parametrize("damage", ["removed", "emptied", "shortened"])
def test_a_damaged_cache_is_compiled_anew(made: Generated, cache: Path, damage: str) -> None:
    (path,) = entries(cache)
    if damage == "removed":
        shutil.rmtree(cache / "fxgraph")
    else:
        path.write_bytes(b"" if damage == "emptied" else path.read_bytes()[:-10])
    assert compiled_anew(made)


def test_code_that_has_other_lines_is_compiled_anew(made: Generated) -> None:
    """As no entry of that key has: whatever goes wrong is no failure of the program's."""
    assert compiled_anew(replace(made, lines=((10**6, ""),)))


def compiler_that_knows(found: Generated) -> SegmentCompiler:
    compiler = SegmentCompiler("inductor")
    compiler.take({structure(segment()): found})
    compiler.look_around()
    return compiler


def compiled_anew(found: Generated) -> bool:
    """Whether a compiler that is told of something does without it, and comes to the same."""
    compiler = compiler_that_knows(found)
    run: Any = compiler(segment())
    x, y = torch.randn(4, 8), torch.randn(8, 2)
    assert torch.equal(run([x, y])[0], x @ y)
    assert compiler.asked_inductor == (IMPORTED not in run.source_code)
    return compiler.asked_inductor


def test_a_compiler_takes_what_it_is_told_of(made: Generated) -> None:
    assert not compiled_anew(made)


@pytest.mark.parametrize("name", ["profiler_mark_wrapper_call", "_micro_pipeline_tp"])
def test_under_other_circumstances_it_is_compiled_anew(made: Generated, name: str) -> None:
    with torch._inductor.config.patch({name: True}):
        assert compiled_anew(made)
    assert not compiled_anew(made)


def test_an_eager_compiler_takes_nothing(made: Generated) -> None:
    compiler = SegmentCompiler("eager")
    compiler.take({structure(segment()): made})
    compiler.look_around()
    assert not hasattr(compiler(segment()), "source_code")


def test_it_notes_what_inductor_has_kept(cache: Path) -> None:
    compiler, graph = SegmentCompiler("inductor"), segment()
    compiler.look_around()
    assert compiler.noted([graph]) == {}
    compiler(graph)
    (found,) = compiler.noted([graph, graph]).values()
    assert load(found) is not None and found.under == under()


def test_it_notes_nothing_that_inductor_has_not_kept(cache: Path) -> None:
    compiler, graph = SegmentCompiler("inductor"), segment()
    with torch._inductor.config.patch({"fx_graph_cache": False}):
        compiler.look_around()
        compiler(graph)
    assert compiler.noted([graph]) == {}


def test_it_notes_nothing_where_circumstances_cannot_be_told(cache: Path) -> None:
    compiler, graph = SegmentCompiler("inductor"), segment()
    with torch._inductor.config.patch({"post_grad_custom_post_pass": OfMine()}):
        compiler.look_around()
        compiler(graph)
    assert compiler.noted([graph]) == {} and entries(cache)


class OfMine(CustomGraphPass):
    """A pass of the user's, which Inductor's own key knows."""

    def __call__(self, graph: fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return "of mine"


def test_what_was_loaded_is_noted_as_it_was(made: Generated) -> None:
    """Its code has other lines by then, which must not be taken for Inductor's."""
    compiler = compiler_that_knows(made)
    compiler(segment())
    assert compiler.noted([segment()]) == {structure(segment()): made}
