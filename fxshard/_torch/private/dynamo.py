"""What Dynamo knows while it hands a captured graph to a backend."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


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
