"""The code that Inductor wrote for a graph at an earlier start, run without importing the compiler.

Inductor's cache is asked through its compiler, and the code in it imports that once more: a third of all that a start
imports, in a process that has nothing to compile. The code has little use for it: of most names none, and of one
namespace functions that torch has by the same names.
"""

from __future__ import annotations

import ast
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxshard._compat.names import imported

INDUCTOR = "torch._inductor"
PRODUCTS = "extern_kernels"
"""What generated code calls a namespace of functions that are no kernels of its own."""


@dataclass(frozen=True)
class Generated:
    """What Inductor made of a graph, in its cache."""

    key: str
    code: str
    """A digest of it: one key may have several."""
    lines: tuple[tuple[int, str], ...]
    """Lines of the code, by their numbers, that import less in place of others."""
    operators: tuple[str, ...]
    """What it calls that Python code defines: who defines it may be among what is not imported."""
    under: str
    """The circumstances in which it was compiled, as whoever noted it calls them."""


def generated(compiled: Any, under: str) -> Generated | None:
    """Where Inductor's cache has what it compiled; None if it was not kept there. torch 2.11, 2.13."""
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(compiled, CompiledFxGraph) or compiled._fx_graph_cache_key is None:
        return None
    source = compiled.source_code
    tree = ast.parse(source)
    lines = tuple(lighter_imports(source, tree).items())
    return Generated(compiled._fx_graph_cache_key, _digest(source), lines, _defined_in_python(tree), under)


def load_generated(found: Generated, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any] | None:
    """What :func:`generated` was asked about, as Inductor has it behind a look into its cache; None if it is not there
    any more, or more is to be done than to run it. torch 2.11, 2.13.
    """
    import torch._inductor.debug  # what is loaded looks there when it is called
    from torch._dynamo.utils import counters
    from torch._guards import TracingContext, tracing
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.triton_bundler import TritonBundler
    from torch._inductor.utils import BoxedBool

    if _more_is_wanted() or not torch.library._defs.issuperset(found.operators):
        return None
    graph = _entry(found)
    if graph is None:
        return None
    constants = CompiledFxGraphConstants()
    with tracing(TracingContext(None)):  # whoever compiles may be told of strides, but not of these
        if graph._triton_bundle:
            TritonBundler.read_and_emit(graph._triton_bundle)
        _change(graph, found.lines)
        graph.after_deserialization(constants)
        graph.post_compile(example_inputs, constants, {"cudagraphs": BoxedBool(False), "is_backward": False})
    CompiledTritonKernels.cache_clear()  # futures that are not valid any more, when they have run
    counters["inductor"]["fxgraph_cache_hit"] += 1
    return graph  # type: ignore[no-any-return]


def _more_is_wanted() -> bool:
    """Whether Inductor would do more than to run what is in its cache: not to look there, to wrap what it finds, to ask
    elsewhere for results of tuning, or to show the code to somebody.
    """
    from torch._inductor import codecache, config

    graph = imported("torch._inductor.graph")
    traces = (getattr(handler, "root_dir", handler) for handler in logging.getLogger("torch.__trace").handlers)
    return (
        not config.fx_graph_cache
        or config.force_disable_caches
        or config.triton.cudagraphs
        or getattr(config, "cudagraph_policy", None) is not None
        or bool(config.bundled_autotune_remote_cache)
        or codecache.output_code_log.isEnabledFor(logging.DEBUG)
        or (graph is not None and graph.GraphLowering.save_output_code is not None)
        or any(trace is not None for trace in traces)
    )


def _entry(found: Generated) -> Any:
    """What is in Inductor's cache, noted for those who take the cache with them (``save_cache_artifacts``)."""
    from torch._inductor.codecache import FxGraphCache, InductorCacheArtifact
    from torch.compiler._cache import CacheArtifactManager

    for graph, content, _ in FxGraphCache.iterate_over_candidates(True, None, found.key):
        same = _digest(graph.source_code) == found.code and _same_libraries(graph)
        if same and not graph.guards_expr and not graph.frozen_param_names:
            CacheArtifactManager.record_artifact(InductorCacheArtifact.type(), found.key, content)
            return graph
    return None


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _same_libraries(graph: Any) -> bool:
    """Whether Triton would link kernels with what it linked these with. torch 2.13; 2.11 does not ask."""
    linked = getattr(graph, "extern_libs_key", None)
    if linked is None:
        return True
    from torch.utils import _triton

    try:
        return bool(linked == _triton._extern_libs_key(_triton.triton_backend()))  # type: ignore[attr-defined]
    except Exception:  # of any kind, as torch has it: there is no Triton any more, or no driver
        return False


def _change(graph: Any, lines: Sequence[tuple[int, str]]) -> None:
    from torch._inductor.codecache import code_hash

    code = graph.source_code.split("\n")
    for number, line in lines:
        code[number] = line
    graph.source_code = "\n".join(code)
    graph.cache_key = code_hash(graph.source_code)  # by which it is written to a file, and read


def lighter_imports(source: str, tree: ast.Module) -> dict[int, str]:
    """Lines, by their numbers from 0, to have in place of such that import Inductor's compiler for nothing: names that
    are not used, and a namespace of which only functions are used that torch has by the same names.
    """
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    text = source.split("\n")
    lines: dict[int, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(INDUCTOR):
            continue
        alone = node.lineno == node.end_lineno and text[node.lineno - 1] == ast.unparse(node)
        bound = {alias.asname or alias.name for alias in node.names}
        if alone and not bound.intersection(names):
            lines[node.lineno - 1] = ""
        elif alone and bound == {PRODUCTS} and _are_torchs(tree, names):
            lines[node.lineno - 1] = f"import torch as {PRODUCTS}"
    return lines


def _are_torchs(tree: ast.AST, names: Sequence[str]) -> bool:
    """Whether all that code has of the namespace is what torch has by the same name."""
    from torch._inductor.select_algorithm import extern_kernels

    used = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PRODUCTS
    ]
    same = all(getattr(extern_kernels, name, None) is getattr(torch, name, tree) for name in used)
    return same and len(used) == names.count(PRODUCTS)


def _defined_in_python(tree: ast.AST) -> tuple[str, ...]:
    """Operators that code names, as ``namespace::name``, other than those that came with torch's libraries."""
    chains = [ast.unparse(node).split(".") for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    named = {"::".join(chain[2:4]) for chain in chains if chain[:2] == ["torch", "ops"]}
    return tuple(sorted(name for name in named if name in torch.library._defs))
