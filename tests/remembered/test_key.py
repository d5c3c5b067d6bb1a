"""Keys of captured graphs: another one for whatever may make another schedule, and none for what nobody can name."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fxshard import _compat
from fxshard.remembered import surroundings
from fxshard.remembered.canonical import Unnamed
from fxshard.remembered.key import key_of
from tests.capturing import captured

X = torch.ones(4, 4)


def key(run: Callable[..., Any], *args: Any) -> str:
    return key_of(captured(run, *args), args, "told")


def sine(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


def again(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Surroundings that stay as they are, where a test is not about them; names of nodes do not depend on functions."""
    monkeypatch.setattr("fxshard.remembered.key.surroundings", lambda: "here")


def test_the_same_graph_has_the_same_key() -> None:
    assert key(sine, X) == key(sine, X) == key(again, X)


@pytest.mark.parametrize(
    ("run", "args"),
    [
        (lambda x: torch.cos(x) * 2, (X,)),
        (lambda x: torch.sin(x) * 2.5, (X,)),
        (lambda x: torch.sin(x) * 2, (X[:2],)),
        (lambda x: torch.sin(x) * 2, (X.t().contiguous().t(),)),
        (lambda x: torch.sin(x) * 2, (X.double(),)),
        (lambda x: torch.sin(x) * 2, (X.clone().requires_grad_(),)),
        (lambda x: torch.sin(x) * 2, (nn.Parameter(X),)),
    ],
    ids=["operator", "number", "size", "stride", "dtype", "gradient", "parameter"],
)
def test_another_graph_has_another(run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    assert key(run, *args) != key(sine, X)


def test_it_matters_which_inputs_share_memory() -> None:
    graph, base = captured(lambda x, y: x + y, X, X.clone()), torch.ones(8, 4)
    apart = key_of(graph, [base[:4].clone(), base[4:].clone()])
    assert apart != key_of(graph, [base[:4], base[4:]])
    assert apart == key_of(graph, [X, X + 1])  # what they hold does not


def test_it_matters_what_fxshard_is_told() -> None:
    graph = captured(sine, X)
    assert key_of(graph, [X], "zero=3") != key_of(graph, [X], "zero=2")


def test_graphs_inside_graphs_count() -> None:
    """Checkpointed stretches are graphs of their own."""

    def checkpointed(inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: checkpoint(inner, x, use_reentrant=False) + 1

    x = X.clone().requires_grad_()
    same = key(checkpointed(sine), x)
    assert same == key(checkpointed(again), x) != key(checkpointed(torch.cos), x)


class Marked(torch.Tensor):
    """A subclass, which may have operators of its own."""


def of_mine(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize(
    "value", [X.as_subclass(Marked), X.to_sparse(), object()], ids=["subclass", "sparse", "object"]
)
def test_inputs_of_which_nobody_can_tell(value: Any) -> None:
    with pytest.raises(Unnamed):
        key_of(captured(sine, X), [value])


def test_functions_and_tensors_in_the_graph_of_which_nobody_can_tell() -> None:
    allowed = torch.compiler.allow_in_graph(of_mine)
    with pytest.raises(Unnamed, match="of_mine"):
        key(lambda x: allowed(x) * 2, X)
    constant = torch.compiler.assume_constant_result(lambda: torch.ones(4))
    with pytest.raises(Unnamed, match="part of the graph"):
        key(lambda x: x + constant(), X)


def test_functions_of_the_programs_own_have_no_name_behind_decorators() -> None:
    """Their own code is torch's, and they say that they are the program's; or that they are torch's."""
    allowed = torch.compiler.allow_in_graph(torch.no_grad()(of_mine))
    with pytest.raises(Unnamed, match="of_mine"):
        key(lambda x: allowed(x) * 2, X)


def test_a_policy_of_what_to_recompute_has_no_name() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    chosen = functools.partial(create_selective_checkpoint_contexts, policy)
    x = X.clone().requires_grad_()
    with pytest.raises(Unnamed, match="context_fn"):
        key(lambda x: checkpoint(sine, x, use_reentrant=False, context_fn=chosen) + 1, x)


def test_operators_of_the_programs_own_have_no_name() -> None:
    with torch.library._scoped_library("tests_key", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
        graph = fx.Graph()
        graph.output(graph.call_function(torch.ops.tests_key.twice.default, (graph.placeholder("x"),)))
        with pytest.raises(Unnamed, match="tests_key"):
            key_of(fx.GraphModule(nn.Module(), graph), [X])


# -- surroundings ------------------------------------------------------------------------------------------------------


def test_files_of_the_program_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edited, it may do something else to torch; installed packages are looked at where they take part."""
    path = tmp_path / "mine.py"
    path.write_text("x = 1")
    module = types.ModuleType("mine")
    module.__file__ = str(path)
    before = surroundings.surroundings()
    monkeypatch.setitem(sys.modules, "mine", module)
    first = surroundings.surroundings()
    os.utime(path, (1, 1))
    assert len({before, first, surroundings.surroundings()}) == 3
    module.__file__ = str(tmp_path / "site-packages" / "mine.py")
    assert surroundings.surroundings() == before
    module.__file__ = str(tmp_path / "gone.py")
    assert surroundings.surroundings() == before


def test_files_of_torch_and_of_fxshard_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings.surroundings()
    with mock.patch.object(_compat, "hash_torch", return_value=b"another"):
        torchs = surroundings.surroundings()
    with mock.patch.object(surroundings, "_fxshard", return_value="another"):
        assert len({before, torchs, surroundings.surroundings()}) == 3


@pytest.mark.parametrize(
    "name",
    [
        "_functorch.partitioners.min_cut_rematerialization_partition",
        "_functorch.aot_autograd.aot_module_simplified",
        "_inductor.fx_passes.joint_graph.joint_graph_passes",
    ],
)
def test_what_stands_in_place_of_a_part_of_torch_is_noticed(name: str) -> None:
    with mock.patch(f"torch.{name}", of_mine), pytest.raises(Unnamed, match="of_mine"):
        surroundings.surroundings()


def test_patterns_of_the_programs_own_are_noticed() -> None:
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.pattern_matcher import CallFunction, KeywordArg, PatternMatcherPass, register_graph_pattern

    mine = PatternMatcherPass()
    register_graph_pattern(CallFunction(torch.ops.aten.sin.default, KeywordArg("x")), pass_dict=mine)(of_mine)
    with (
        mock.patch.object(joint_graph, "pass_patterns", [*joint_graph.pass_patterns, mine]),
        pytest.raises(Unnamed, match="of_mine"),
    ):
        surroundings.surroundings()


def test_decompositions_behind_decorators_of_torchs_are_noticed() -> None:
    from torch._prims_common.wrappers import out_wrapper

    wrapped = out_wrapper()(of_mine)
    table = {**_compat.inductor_decompositions(), torch.ops.aten.sin.default: wrapped}
    with (
        mock.patch("torch._inductor.decomposition.select_decomp_table", lambda: table),
        pytest.raises(Unnamed, match="decomposition"),
    ):
        surroundings.surroundings()


def test_a_decomposition_less_is_another_program() -> None:
    table = dict(_compat.inductor_decompositions())
    table.popitem()
    before = surroundings.surroundings()
    with mock.patch("torch._inductor.decomposition.select_decomp_table", lambda: table):
        assert surroundings.surroundings() != before


TABLE = "torch._inductor.decomposition"


def test_inductors_table_is_not_imported_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fxshard imports it later, and nobody changes it, it is the same program."""
    names = set(map(str, _compat.inductor_decompositions()))
    monkeypatch.setattr(_compat.inductor, "_as_imported", names)
    imported = surroundings.surroundings()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, TABLE)
        assert surroundings.surroundings() == imported
        assert TABLE not in sys.modules
    monkeypatch.setattr(_compat.inductor, "_as_imported", set())  # somebody else imported it
    assert surroundings.surroundings() != imported


def test_decompositions_that_inductors_table_will_have_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, TABLE, raising=False)
    monkeypatch.setitem(torch._decomp.decomposition_table, torch.ops.aten.sin.default, of_mine)
    with pytest.raises(Unnamed, match=r"decomposition .*of_mine"):
        surroundings.surroundings()


def test_decompositions_of_other_operators_are_none_of_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, TABLE, raising=False)
    monkeypatch.setitem(torch._decomp.decomposition_table, torch.ops._c10d_functional.wait_tensor.default, of_mine)
    surroundings.surroundings()


def test_lowerings_of_the_programs_own_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering

    monkeypatch.setitem(lowering.lowerings, torch.ops.aten.sin.default, of_mine)
    with pytest.raises(Unnamed, match="lowerings"):
        surroundings.surroundings()


def test_a_pass_for_a_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen import common

    monkeypatch.setitem(common.custom_backend_passes, "cpu", of_mine)
    with pytest.raises(Unnamed, match="of_mine"):
        surroundings.surroundings()


def test_a_configuration_for_a_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen import common

    monkeypatch.setitem(common.custom_backend_codegen_configs, "cpu", torch._inductor.config)
    with pytest.raises(Unnamed):
        surroundings.surroundings()


def test_nobody_recalls_who_looks_for_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.compiler_bisector import CompilerBisector

    monkeypatch.setattr(CompilerBisector, "bisection_enabled", True)
    with pytest.raises(Unnamed):
        surroundings.surroundings()


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("torch._inductor.config", "_micro_pipeline_tp", True),
        ("torch._inductor.config", "_fuse_ddp_communication_passes", ["schedule_comm_wait"]),
        ("torch._inductor.config", "trace.provenance_tracking_level", 1),
        ("torch._inductor.config_comms", "reorder_iterative_peak_memory_budget", 0.9),
        ("torch.compiler.config", "cache_key_tag", "another"),
    ],
)
def test_what_inductors_key_has_is_in_ours(module: str, name: str, value: Any) -> None:
    before = surroundings.surroundings()
    with importlib.import_module(module).patch({name: value}):
        assert surroundings.surroundings() != before


def test_torchs_own_table_of_decompositions_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings.surroundings()
    monkeypatch.delitem(torch._decomp.decomposition_table, torch.ops.aten.silu_backward.default)
    assert surroundings.surroundings() != before


def test_what_compilers_have_written_is_no_part_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for path, counts in ((tmp_path / "ab" / "cabinet.py", False), (tmp_path / "cabinet.py", True)):
        before = surroundings.surroundings()
        path.parent.mkdir(exist_ok=True)
        path.touch()
        module = types.ModuleType("cabinet")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "cabinet", module)
        assert (surroundings.surroundings() != before) is counts


@pytest.mark.timeout(60)
def test_modules_that_are_being_imported_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "takes_its_time.py").write_text("import time\ntime.sleep(0.5)\nlast = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _compat.names.imported("takes_its_time") is None
    thread = threading.Thread(target=importlib.import_module, args=("takes_its_time",))
    thread.start()
    while "takes_its_time" not in sys.modules:
        time.sleep(0.01)
    assert _compat.names.imported("takes_its_time").last == 1
    thread.join()


def test_another_build_of_triton_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the same version."""
    library = tmp_path / "triton" / "_C" / "libtriton.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").touch()
    library.write_bytes(b"one")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = surroundings.surroundings()
    library.write_bytes(b"two")
    os.utime(library, (1, 1))
    later = surroundings.surroundings()
    library.write_bytes(b"another")
    os.utime(library, (1, 1))
    assert len({before, later, surroundings.surroundings()}) == 3


@pytest.mark.parametrize(
    "name",
    [
        "joint_custom_pre_pass",
        "joint_custom_post_pass",
        "post_grad_custom_pre_pass",
        "post_grad_custom_post_pass",
        "_pre_fusion_custom_pass",
        "_fuse_ddp_communication_passes",
    ],
)
@pytest.mark.parametrize("given", [of_mine, [of_mine]], ids=["one", "list"])
def test_passes_given_to_inductor_are_noticed(name: str, given: Any) -> None:
    """Its own list of what its configuration is leaves them out."""
    with torch._inductor.config.patch({name: given}), pytest.raises(Unnamed, match="of_mine"):
        surroundings.surroundings()


@contextmanager
def library_of_the_programs_own() -> Iterator[torch.library.Library]:
    library = torch.library.Library("aten", "IMPL")
    try:
        yield library
    finally:
        library._destroy()


@pytest.mark.parametrize(
    "make", [library_of_the_programs_own, lambda: torch.library._scoped_library("aten", "IMPL")], ids=["own", "torch's"]
)
def test_kernels_of_the_programs_own_for_torchs_operators_are_noticed(make: Any) -> None:
    """Also where torch registers them for it."""
    before = surroundings.surroundings()
    with make() as library:
        library.impl("tanh", lambda x: x, "AutogradCPU")
        with pytest.raises(Unnamed, match=r"aten::tanh, registered in .*\.py"):
            surroundings.surroundings()
    assert surroundings.surroundings() == before


class Callable_:
    """An object that can be called."""

    def __call__(self, x: Tensor) -> Tensor:
        return x + 1


def test_objects_that_can_be_called_are_noticed() -> None:
    table = {**_compat.inductor_decompositions(), torch.ops.aten.sin.default: Callable_()}
    with (
        mock.patch("torch._inductor.decomposition.select_decomp_table", lambda: table),
        pytest.raises(Unnamed, match="decomposition"),
    ):
        surroundings.surroundings()


def test_modules_that_are_not_imported_yet_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError(f"{name} needs something that is not installed")

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    surroundings.surroundings()
