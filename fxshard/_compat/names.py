"""Whose a function, a class or an operator is, and by which name another process has it."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

NAMESPACES = {"aten", "prim", "prims", "rngprims", "inductor", "inductor_prims", "_c10d_functional", "fxshard"}
"""Operators that torch and fxshard define."""
ROOTS = {"torch", "fxshard", *sys.stdlib_module_names} - {"__main__"}
_IN_C = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
_OF_TORCH = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)


def imported(name: str) -> Any:
    """A module that somebody has imported, or is importing, which is waited for; None if nobody has."""
    return import_module(name) if name in sys.modules else None


def own_name(value: Any) -> str | None:
    """The name of what torch, fxshard or Python itself define; None for anything else. torch 2.11, 2.13."""
    path = operator_path(value)
    if path is not None:
        return f"{path[0]}::{path[1]}.{path[2]}"
    if isinstance(value, torch._ops.HigherOrderOperator):
        return f"higher_order::{value.name()}" if type(value).__module__.partition(".")[0] == "torch" else None
    if isinstance(value, _IN_C):
        owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
        homes = (
            getattr(value, "__module__", None),
            getattr(owner, "__module__", None),
            getattr(owner, "__name__", None),
        )
        home = next((home for home in homes if home), "")
        return f"{home}.{value.__qualname__}" if home.partition(".")[0] in ROOTS else None
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}" if _is_there(value) and is_own(value) else None
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}" if _is_there(value) else None
    return None


def is_own(function: Any) -> bool:
    """Whether torch's, fxshard's or Python's files have the code of a function, and of all that decorators have wrapped
    in it, whatever it says its module is.
    """
    todo, seen = [function], set()
    while todo:
        found = todo.pop()
        if not callable(found) or isinstance(found, (type, *_IN_C)) or id(found) in seen:
            continue
        seen.add(id(found))
        code = getattr(found, "__code__", None)
        if code is None and not isinstance(found, _OF_TORCH):  # an object that can be called
            todo.append(type(found).__call__)
        elif code is not None and not code.co_filename.startswith(own_directories()):
            return False
        todo += [getattr(found, name, None) for name in ("__wrapped__", "__func__", "func")]
        todo += [cell.cell_contents for cell in getattr(found, "__closure__", None) or () if _is_filled(cell)]
    return True


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def operator_path(value: Any) -> tuple[str, str, str] | None:
    """Namespace, name and overload of an operator that torch or fxshard define. torch 2.11, 2.13."""
    if isinstance(value, torch._ops.OpOverload):
        return (value.namespace, value._opname, value._overloadname) if value.namespace in NAMESPACES else None
    if isinstance(value, torch._ops.OpOverloadPacket):
        namespace, _, name = value._qualified_op_name.partition("::")
        return (namespace, name, "") if namespace in NAMESPACES else None
    return None


def operator_at(namespace: str, name: str, overload: str) -> Any:
    """The operator with such a path. torch 2.11, 2.13."""
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload) if overload else packet


def _is_there(value: Any) -> bool:
    """Whether a class or a function is where it says."""
    if value.__module__ is None or value.__module__.partition(".")[0] not in ROOTS:
        return False
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


@cache
def own_directories() -> tuple[str, ...]:
    """How the paths of torch's, fxshard's and Python's files begin."""
    paths = [Path(torch.__file__).parent, Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))]
    return ("<frozen ", "<attrs generated", *(f"{path}{os.sep}" for path in paths))
