"""What fxshard asks of Inductor. Each function says which versions of torch were seen to have what it uses."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxshard._compat.names import imported

_DECOMPOSITIONS = "torch._inductor.decomposition"
_as_imported: set[str] = set()
"""The operators that Inductor's table of decompositions had when fxshard imported it, if nobody did before."""


def inductor_decompositions() -> dict[Any, Any]:
    """The decompositions that Inductor's lowerings assume. torch 2.11, 2.13."""
    new = _DECOMPOSITIONS not in sys.modules
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    if new:
        _as_imported.update(map(str, table))
    return table


def known_decompositions() -> dict[Any, Any]:
    """The same where they are imported; otherwise those of torch that they will be made of. torch 2.11, 2.13."""
    if imported(_DECOMPOSITIONS) is not None:
        return inductor_decompositions()
    return {each: found for each, found in _torchs().items() if each.name().startswith(("aten::", "prims::"))}


def named_decompositions() -> tuple[list[str], list[str] | None]:
    """The operators in torch's table of decompositions, and in Inductor's: None if that is as it is imported, or will
    be. torch 2.11, 2.13.
    """
    found = set(map(str, inductor_decompositions())) if imported(_DECOMPOSITIONS) is not None else _as_imported
    return sorted(map(str, _torchs())), sorted(found) if found != _as_imported else None


def _torchs() -> dict[Any, Any]:
    from torch._decomp import decomposition_table

    return dict(decomposition_table)  # others may add to it


def inductor_joint_passes(graph: fx.GraphModule) -> fx.GraphModule:
    """What Inductor does to a graph before it is partitioned (random numbers, attention patterns). torch 2.11, 2.13.

    Not optional under the Inductor lowering: random ops that it has not rewritten have no lowering.
    """
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    with V.set_fake_mode(detect_fake_mode(values)):  # what replaces random numbers makes fake tensors
        return joint_graph_passes(graph)


def inductor_compile(segment: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Lower one graph to a boxed callable. torch 2.11, 2.13.

    Inductor appends to the tracing context of whoever calls it and insists that it starts out empty, hence a fresh one.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor.compile_fx import compile_fx_inner

    with tracing(TracingContext(detect_fake_mode(list(example_inputs)))):
        return compile_fx_inner(segment, example_inputs)  # type: ignore[return-value, arg-type]


@functools.cache
def _cache_directories() -> Any:
    """The module that knows where caches are, and needs nothing of the package that it is in, which takes a second to
    import.
    """
    name = "torch._inductor.runtime.cache_dir_utils"
    if "torch._inductor" in sys.modules:
        return importlib.import_module(name)
    path = Path(torch.__file__).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_cache() -> str:
    """The directory of Inductor's caches. torch 2.11, 2.13."""
    return str(_cache_directories().cache_dir())


def is_generated(path: str) -> bool:
    """Whether Inductor has written a file: they lie in folders by two letters of their names. torch 2.11, 2.13."""
    folder, name = os.path.split(path)
    return folder == os.path.join(compile_cache(), name[1:3])


def import_dynamo() -> None:
    """What Inductor imports first, and half of all that it does. torch 2.11, 2.13."""
    import torch._dynamo  # noqa: F401


def import_inductor() -> None:
    """All that compiling a graph imports. torch 2.11, 2.13."""
    from torch._inductor import compile_fx, lowering  # noqa: F401


def hash_torch() -> bytes:
    """A digest of torch's Python files, which Inductor's cache asks of a process once. torch 2.11, 2.13."""
    from torch._inductor.codecache import torch_key

    return torch_key()


def triton_hasher() -> Callable[[], object]:
    """What makes the other digest that Inductor's cache asks for: of Triton's files, hundreds of megabytes. It imports
    nothing any more. Triton 3.6 with torch 2.11, 2.13; older ones have it elsewhere."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # as Inductor looks for it, who takes a second to import
        try:
            from triton.compiler.compiler import triton_key
        except ImportError:
            return lambda: None
    return triton_key  # type: ignore[no-any-return]


def triton_files() -> list[tuple[str, int, int]]:
    """Triton's libraries, their sizes and when each was last changed. All of its files are hundreds of megabytes."""
    spec = PathFinder.find_spec("triton")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    found = [path for folder in folders for path in Path(folder, "_C").glob("*.so")]
    status = [(str(path), path.stat()) for path in sorted(found)]
    return [(path, each.st_size, each.st_mtime_ns) for path, each in status]


def compile_clocks() -> dict[str, float]:
    """Seconds that torch has spent in parts of compiling, by its own clocks; some lie in others. torch 2.11, 2.13."""
    from torch._dynamo.utils import compilation_time_metrics

    return {name: sum(seconds) for name, seconds in compilation_time_metrics.items()}
