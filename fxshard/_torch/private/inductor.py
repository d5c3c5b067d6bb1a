"""What fxshard asks of Inductor. Each function says which versions of torch were seen to have what it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils.checkpoint import CheckpointPolicy


def inductor_decompositions() -> dict[Any, Any]:
    """The decompositions that Inductor's lowerings assume. torch 2.11, 2.13."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_joint_passes(graph: fx.GraphModule) -> fx.GraphModule:
    """What Inductor does to a graph before it is partitioned (random numbers, attention patterns). torch 2.11, 2.13.

    Not optional under the Inductor lowering: random ops that it has not rewritten have no lowering. It makes one
    operator draw the seeds of all random numbers and looks them up by number; what is looked up is what may be saved
    for backward, so that :func:`draw_seeds_apart` can undo it in forward alone.
    """
    from torch._guards import detect_fake_mode
    from torch._inductor import inductor_prims
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    before, results = set(graph.graph.nodes), _values_of_results(graph.graph)
    mode = detect_fake_mode(values)
    with V.set_fake_mode(mode):  # what replaces random numbers makes fake tensors
        graph = joint_graph_passes(graph)
    for lookup in graph.graph.find_nodes(op="call_function", target=inductor_prims.lookup_seed):
        lookup.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if any(_lays_out_its_result(node) for node in graph.graph.nodes if node not in before):
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*values)
        _keep_contiguous(graph, results)
    return graph


def _lays_out_its_result(node: fx.Node) -> bool:
    """Whether a node is a product or attention: one that Inductor has put into the place of another may lay out its
    result in another way (a product of padded operands, of which the padding is cut off), and the values of the nodes
    after it are still those of the other.
    """
    name = getattr(node.target, "_opname", "")
    return name in ("mm", "addmm", "bmm") or name.startswith("_scaled_dot_product")


def _values_of_results(graph: fx.Graph) -> list[Any]:
    return [each.meta.get("val") if isinstance(each, fx.Node) else None for each in _results(graph)]


def _results(graph: fx.Graph) -> list[Any]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def _keep_contiguous(graph: fx.GraphModule, before: Sequence[Any]) -> None:
    """Copy results that were contiguous and are no longer: who gets them may view them in another shape."""
    end, results = graph.graph.output_node(), _results(graph.graph)
    for i, (result, was) in enumerate(zip(results, before, strict=True)):
        if isinstance(was, torch.Tensor) and was.is_contiguous() and not result.meta["val"].is_contiguous():
            with graph.graph.inserting_before(end):
                how: dict[str, Any] = {"memory_format": torch.contiguous_format}
                results[i] = graph.graph.call_function(torch.ops.aten.clone.default, (result,), how)
            results[i].meta["val"] = was
    end.args = (tuple(results),)


def draw_seeds_apart(graph: fx.Graph) -> None:
    """Each random number draws its own seed: with numbers of seeds in them, layers that are alike would not be.
    torch 2.11, 2.13.

    For graphs that no common subexpressions will be looked for in, as the partitioner does: two draws would be one.
    """
    from torch._inductor import inductor_prims

    for lookup in graph.find_nodes(op="call_function", target=inductor_prims.lookup_seed):
        with graph.inserting_before(lookup):
            seed = graph.call_function(inductor_prims.seed, (lookup.args[0].args[1],))
        seed.meta["val"] = lookup.meta["val"]
        lookup.replace_all_uses_with(seed)
        graph.erase_node(lookup)
    for seeds in graph.find_nodes(op="call_function", target=inductor_prims.seeds):
        graph.erase_node(seeds)


def inductor_compile(segment: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Lower one graph to a boxed callable. torch 2.11, 2.13.

    Inductor appends to its caller's tracing context and requires that it is empty at first, hence a fresh one. It
    expects that the graph's seeds are drawn together.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.replace_random import fuse_seed_creation_pass
    from torch._inductor.virtualized import V

    values = [node.meta.get("val") for node in segment.graph.nodes]
    with V.set_fake_mode(detect_fake_mode(values)):
        fuse_seed_creation_pass(segment.graph)
    with tracing(TracingContext(detect_fake_mode(list(example_inputs)))):
        return compile_fx_inner(segment, example_inputs)  # type: ignore[return-value, arg-type]


def start_compile_workers() -> None:
    """Start the processes in which Inductor compiles Triton kernels, as ``torch.compile`` does. torch 2.11, 2.13.

    ``TORCH_WARM_POOL=0`` leaves that to the first kernel, and ``TORCHINDUCTOR_COMPILE_THREADS`` says how many.
    """
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def compile_clocks() -> dict[str, float]:
    """Seconds that torch has spent in parts of compiling, by its own clocks; some lie in others. torch 2.11, 2.13."""
    from torch._dynamo.utils import compilation_time_metrics

    return {name: sum(seconds) for name, seconds in compilation_time_metrics.items()}


def activation_memory_budget(share: float) -> AbstractContextManager[Any]:
    """What torch's partitioner may save of what it would, in graphs that are compiled meanwhile. torch 2.11, 2.13."""
    from torch._functorch import config

    return config.patch(activation_memory_budget=share)  # type: ignore[attr-defined, no-any-return]
