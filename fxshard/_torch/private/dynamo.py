"""What Dynamo knows while it hands a captured graph to a backend."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


def graph_break(graph: fx.GraphModule) -> str | None:
    """Where and why Dynamo ended a graph early, None where it captured to the end. torch 2.11, 2.13."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    where = [f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack]
    return f"{where[-1] if where else 'unknown code'}: {reason.reason.splitlines()[0]}"


def graph_input_example(placeholder: fx.Node) -> Any:
    """The real value of an input of a Dynamo graph: for a parameter, the parameter itself. torch 2.11, 2.13."""
    argument = placeholder.meta.get("grapharg")
    return argument.example if argument is not None else None


def leave_sizes_open(values: Any) -> None:
    """Have the next graph take these tensors in other sizes, too, where its code allows it. torch 2.11, 2.13."""
    for tensor in tree_leaves(values):
        if isinstance(tensor, torch.Tensor):
            for dim in range(tensor.dim()):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)


def open_floats(graph: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the inputs of a Dynamo graph that are Python numbers of any value: tensors of which the graph takes
    the ``item()``. torch 2.13."""
    inputs = graph.graph.find_nodes(op="placeholder")
    return tuple(i for i, node in enumerate(inputs) if any(_is_item(user) for user in node.users) and _is_number(node))


def with_floats(graph: fx.GraphModule, values: Mapping[int, float]) -> fx.GraphModule:
    """The graph for these values of ``open_floats``: after Dynamo it can be traced no other way. Changes the graph."""
    inputs = graph.graph.find_nodes(op="placeholder")
    for i, value in values.items():
        for item in [user for user in inputs[i].users if _is_item(user)]:
            with graph.graph.inserting_before(item):
                item.replace_all_uses_with(graph.graph.call_function(float, (value,)))
            graph.graph.erase_node(item)
    return graph


def _is_number(placeholder: fx.Node) -> bool:
    return bool(getattr(placeholder.meta.get("grapharg"), "pass_arg_as_tensor", False))


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


class OpenInputs:
    """What Dynamo traced a graph with, where sizes are left open: to trace the same graph once more, after Dynamo."""

    def __init__(self, values: list[Any], fake_mode: Any) -> None:
        self.values = values
        self._fake_mode = fake_mode

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """The sizes in ``values`` have a meaning inside. torch 2.11, 2.13."""
        from torch._guards import TracingContext, tracing

        with tracing(TracingContext(self._fake_mode)):
            yield


def open_inputs(graph: fx.GraphModule) -> OpenInputs | None:
    """Inputs of a Dynamo graph with open sizes. None where all are fixed, or a float is open. torch 2.11, 2.13.

    An open float could make a later trace restart Dynamo, which is over by then.
    """
    from torch._guards import TracingContext
    from torch.fx.experimental.symbolic_shapes import SymT, symbol_is_type

    context = TracingContext.try_get()
    environment = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    if context is None or environment is None:
        return None
    values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else (value,))]
    renamed = hasattr(environment, "backed_var_to_val")
    symbols = environment.backed_var_to_val if renamed else environment.var_to_val
    if any(symbol_is_type(symbol, SymT.FLOAT) for symbol in symbols):
        return None
    return OpenInputs(values, context.fake_mode) if any(isinstance(size, torch.SymInt) for size in sizes) else None


@contextlib.contextmanager
def without_logging() -> Iterator[None]:
    """What Dynamo captures in here has no calls of loggers, nor of ``warnings.warn``. torch 2.13.

    In torch 2.11 no calls of loggers. The setting is the one that torch documents for this. It is assigned, because
    ``config.patch`` takes ten times as long, and this is entered with every step.
    """
    config = torch._dynamo.config
    before = config.ignore_logging_functions
    config.ignore_logging_functions = _Ignored(before, warnings.warn, *_loggers())
    try:
        yield
    finally:
        config.ignore_logging_functions = before


@contextlib.contextmanager
def collecting_in_checkpoints() -> Iterator[None]:
    """Checkpointed code that is captured in here may append to a list outside of it. torch 2.11, 2.13.

    It appends in forward, and not again where backward computes the code once more. The setting is torch's for this.
    """
    config = torch._dynamo.config
    before = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    try:
        yield
    finally:
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = before


def _loggers() -> list[Any]:
    """The methods of loggers, those that ``transformers`` adds included, if it is imported."""
    methods = [getattr(logging.Logger, name, None) for name in _LOGS]
    return [method for method in methods if method is not None]


_LOGS = [
    *["debug", "info", "warning", "warn", "error", "exception", "critical", "log"],
    *["info_once", "warning_once", "warning_advice"],
]


class _Ignored(set[Any]):
    """Functions that Dynamo ignores. torch 2.11 writes the whole setting as JSON to its log of compilations, where a
    function is an error on the screen: there it finds nothing to write, and methods of loggers are still members."""

    def __init__(self, before: set[Any], *functions: Any) -> None:
        super().__init__({*before, *functions})

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if torch.__version__ < "2.12" else super().__iter__()


def module_path(node: fx.Node) -> str:
    """The module whose forward a node is from, by its name; empty where Dynamo wrote none down. torch 2.11, 2.13."""
    stack = node.meta.get("nn_module_stack")  # of the model's own forward there is none
    return _by_names(str(next(reversed(stack.values()))[0])) if stack else ""


def input_name(node: fx.Node) -> str:
    """What an input of Dynamo's graph is called: an argument of forward, a buffer, a parameter. torch 2.11, 2.13."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", node.name)
    name = name() if callable(name) else name  # which one depends on the version
    return _by_names(name) or name[3:-2]  # L['x'] is an argument by itself


def _by_names(path: str) -> str:
    """How Dynamo writes where it found something, as names that a user has.

    >>> _by_names("L['model'].layers.0"), _by_names("L['self']._modules['head']._buffers['mask']")
    ('layers.0', 'head.mask')
    """
    path = re.sub(r"^[LG]\['[^']*'\]|\.__dict__\['_modules'\]|\._(modules|buffers|parameters)(?=\[)", "", path)
    return re.sub(r"\['?([^']*?)'?\]", r".\1", path).lstrip(".")


def leaves_alone(function: Any) -> bool:
    """Whether Dynamo was told to leave a function alone, by ``torch.compiler.disable`` or by a decorator that uses it,
    as Transformer Engine's does. torch 2.11, 2.13.
    """
    plain = getattr(function, "__func__", function)
    kept = [cell.cell_contents for cell in getattr(plain, "__closure__", None) or ()]
    return any(getattr(each, "_torchdynamo_disable", False) for each in (plain, *kept))
