"""AOTAutograd in two halves: it traces a captured graph, and later makes a callable of what the graph was compiled to.

``aot_export_joint_with_descriptors`` and ``aot_compile_joint_with_descriptors``: torch 2.11, 2.13.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

BoxedCallable = Callable[[list[Any]], Any]

OTHER_TANGENT = -1
"""The gradient of what is no plain result of a graph: of the new value of an input, of the base of a view."""


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module for an intermediate graph. Its code is written when first run or read. torch 2.11, 2.13."""
    return _LazyGraphModule(root, graph)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with nodes of its own; what it refers to is shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph_module(module, graph)


class Traced:
    """A graph that AOTAutograd has traced: forward and backward in one, or forward alone where nothing is trained."""

    def __init__(self, joint: Any, graph: fx.GraphModule, constants: Sequence[torch.Tensor]) -> None:
        self._joint = joint
        self._constants = tuple(constants)
        self.graph = graph
        self.trains = bool(joint._aot_state.needs_autograd)

    @property
    def outputs(self) -> int | None:
        """How many outputs are forward's; gradients follow. None where there is no backward."""
        if not self.trains:
            return None
        inner, tokens = self._inner, self._joint._aot_state.fw_metadata.tokens
        made = inner.num_outputs + inner.num_intermediate_bases + inner.num_outputs_rng_offset
        return int(len(self.written_inputs) + made + len(tokens))

    @property
    def _inner(self) -> Any:
        """What AOTAutograd knows of the graph, whose inputs are those inside of tensor subclasses."""
        subclasses = self._joint._aot_graph_capture.maybe_subclass_meta
        return subclasses.fw_metadata if subclasses is not None else self._joint._aot_state.fw_metadata

    @property
    def effects(self) -> tuple[str, ...]:
        """What has side effects in the graph: calls that check what LAPACK says, by their names, and other operators.
        Their order is kept by tokens that are inputs and outputs of the graph.
        """
        calls = self.graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)
        names = (
            call.args[3] if call.args[1] is torch.ops.aten._linalg_check_errors.default else call.args[1]
            for call in calls
        )
        return tuple(dict.fromkeys(map(str, names)))

    @property
    def written_inputs(self) -> tuple[int, ...]:
        """Positions of inputs that get a new value after forward, as buffers that forward changes."""
        return tuple(self._inner.mutated_inp_runtime_indices)

    @property
    def static_inputs(self) -> tuple[int, ...]:
        """Positions of inputs that stay where they are between calls."""
        return tuple(self._joint._aot_state.fw_metadata.static_input_indices or ())

    def callable(
        self, graphs: Sequence[fx.GraphModule], forward: BoxedCallable, backward: BoxedCallable | None
    ) -> Callable[..., Any]:
        """What Dynamo calls with the inputs of the captured graph. ``graphs``: forward and backward, or forward alone;
        of them AOTAutograd looks at inputs and outputs only.
        """
        from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors

        state = self._joint._aot_state
        state.aot_config = replace(state.aot_config, enable_log=_graphs_are_logged())
        run = aot_compile_joint_with_descriptors(
            self._joint,
            partition_fn=lambda *_, **__: tuple(graphs),
            fw_compiler=lambda *_: forward,
            bw_compiler=lambda *_: backward,
        )
        # Programs write to nothing that forward saved, so autograd may keep it for another backward (retain_graph).
        state.fw_metadata.bw_donated_idxs = []
        if not self._constants:
            return run
        constants = self._constants
        return lambda *args: run(*constants, *args)


@contextlib.contextmanager
def traced(graph: fx.GraphModule, inputs: Sequence[Any], decompositions: Mapping[Any, Any] | None) -> Iterator[Traced]:
    """Trace a graph that Dynamo captured. The callable must be made before the block ends.

    Tensors that are part of the graph become its first inputs. The graph modules that torch makes write their Python
    code when they are first run or read, as with Inductor.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    constants = [
        *dict(graph.named_parameters(remove_duplicate=False)).values(),
        *dict(graph.named_buffers(remove_duplicate=False)).values(),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_use_lazy_graph_module(True))
        joint = aot_export_joint_with_descriptors(
            stack, graph, tuple(inputs), decompositions=dict(decompositions or {})
        )
        if not joint._aot_state.needs_autograd:
            _draw_once(joint.graph_module.graph)
        yield Traced(joint, _with_open_numbers_as_tensors(joint.graph_module), constants)


def _draw_once(graph: fx.Graph) -> None:
    """Of what a model checkpoints, let random numbers be kept where nothing is trained. torch 2.13.

    AOTAutograd refuses to compute such a graph's random numbers again, even where there is no backward to do it for.
    """
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.meta.pop("recompute", None)


def _graphs_are_logged() -> bool:
    """Whether the graphs that AOTAutograd writes out are read. It writes them for no reader, too, which takes 6 to 8 %
    of the time to compile a model on a CPU. torch 2.11, 2.13.
    """
    from torch._functorch._aot_autograd import graph_compile
    from torch._logging._internal import trace_log

    logs = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
    return bool(trace_log.handlers) or any(log.isEnabledFor(logging.INFO) for log in logs)


def tangent_of(node: fx.Node) -> int | None:
    """Of an input of a backward graph: the number of the captured graph's result that it is the gradient of.

    None for what is saved by forward. torch 2.11, 2.13.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, TangentAOTInput

    described = node.meta.get("desc")
    if not isinstance(described, TangentAOTInput):
        return None
    return described.output.idx if isinstance(described.output, PlainAOTOutput) else OTHER_TANGENT


def before_backward(results: Sequence[Any], tell: Callable[[frozenset[int]], None]) -> None:
    """Ahead of each backward of a compiled graph that returned ``results``, ``tell`` gets the numbers of those that
    have no gradient there. AOTAutograd itself gives them zeros. torch 2.11, 2.13.

    Gradients are recorded while it runs if backward was called with ``create_graph=True``.
    """
    places = {
        number: (value.grad_fn, value.output_nr)
        for number, value in enumerate(results)
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    }
    nodes = {node for node, _ in places.values() if node.name() == "CompiledFunctionBackward"}
    for node in nodes:  # one; a view has a node of its own after it, and counts as used
        own = {number: place for number, (other, place) in places.items() if other is node}
        node.register_prehook(lambda grads, own=own: tell(frozenset(n for n, i in own.items() if grads[i] is None)))


def _with_open_numbers_as_tensors(joint: fx.GraphModule) -> fx.GraphModule:
    """A graph in which the Python floats that Dynamo left open are tensors. torch 2.11, 2.13.

    A float that cannot be one (the ``eps`` of a norm) makes this restart Dynamo, which then takes the number as it is.
    ``aot_compile_joint_with_descriptors`` does the same, but only when everything is scheduled and compiled; it finds
    the graph as it was, because in one that has been through this it would take every float for a fixed one.
    """
    from torch._guards import detect_fake_mode
    from torch.fx.passes._tensorify_python_scalars import tensorify_python_scalars

    fake = detect_fake_mode()
    if fake is None or fake.shape_env is None:
        return joint
    module = copied(joint)
    tensorify_python_scalars(module, fake.shape_env, fake)
    return module
