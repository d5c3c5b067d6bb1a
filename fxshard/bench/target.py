"""The model that a command is about: a preset's name, or ``MODULE:FACTORY``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fxshard._torch.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


class UsageError(Exception):
    """A command cannot do what it was asked for; the message says what it can do."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a ``ConfigError`` about an argument into a ``UsageError``: a message for the terminal, not a crash."""
    try:
        yield
    except ConfigError as error:
        raise UsageError(str(error)) from None


def transformers() -> Any:
    """The library, or how to install it."""
    try:
        import transformers
    except ImportError:
        raise UsageError("models of transformers need it: pip install -c constraints.txt -e '.[hf]'") from None
    return transformers


def load(target: str, layers: int | None = None) -> tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]:
    """The model and example inputs that a preset's name or ``MODULE:FACTORY`` stands for."""
    from fxshard.bench.presets import PRESETS

    factory = PRESETS.get(target)
    if factory is None:
        if target.endswith(".py"):
            raise UsageError(
                f"{target} needs the name of a function in it: {target}:build, which returns (module, inputs)"
            )
        if ":" not in target:
            raise UsageError(f"unknown preset {target!r}; known are {', '.join(PRESETS)}. For your own: MODULE:FACTORY")
        factory = _factory(target)
    options = {}
    if layers is not None:
        if "layers" not in inspect.signature(factory).parameters:
            raise UsageError(f"--layers: {target} takes no argument 'layers'")
        options["layers"] = layers
    parameters = inspect.signature(factory).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.kind not in kinds and p.default is p.empty and p.name not in options]
    if needed:
        raise UsageError(
            f"{target} takes {', '.join(needed)}: give a function that needs no arguments and returns (module, "
            "example_inputs)"
        )
    return _model_and_inputs(factory(**options), target)


def about(target: str, layers: int | None, inputs: Any) -> str:
    """The heading of a table or a page: the model, how many of its layers are shown if not all, the inputs."""
    import torch

    given = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    shapes = {" × ".join(map(str, value.shape)): None for value in given if isinstance(value, torch.Tensor)}
    shown = "all layers" if layers is None else f"{layers} layers (--layers)"
    return " · ".join([target, shown, f"inputs of {', '.join(shapes)}" if shapes else "no tensors as inputs"])


def parallelizing(target: str, model: nn.Module) -> Callable[..., Any]:
    """The function that cuts the model for the dimension ``tp`` of a mesh: a preset's, or ``parallelize`` from the
    module of the factory."""
    from fxshard.bench.presets import PRESETS
    from fxshard.bench.tensor_parallel import cut, is_dense

    if target in PRESETS:
        if not is_dense(model):
            raise UsageError(f"--tp: {target} has no tensor-parallel plan; llama-8b and llama-70b have one")
        return cut
    where = target.rpartition(":")[0]
    given = getattr(_module(where), "parallelize", None)
    if not callable(given):
        raise UsageError(
            f"--tp: {where} has no function 'parallelize(model, mesh)'; it is to cut the model for mesh[\"tp\"], "
            "in place or as another one, such as with torch's parallelize_module"
        )
    return given


def _factory(target: str) -> Callable[..., Any]:
    where, _, name = target.rpartition(":")
    module = _module(where)
    factory = getattr(module, name, None)
    if not callable(factory):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        functions = f"; its functions are {', '.join(found)}" if found else ""
        raise UsageError(f"{where} has no function {name!r}{functions}")
    return factory


def _module(where: str) -> ModuleType:
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise UsageError(f"there is no file {where}")
        sys.path.insert(0, str(path.absolute().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(error.name + ".")):
            raise UsageError(f"there is no module {where!r} here or installed") from None
        raise


def _model_and_inputs(made: Any, target: str) -> tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]:
    from torch import nn

    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{target} returned a {type(made).__name__}; expected an nn.Module or (nn.Module, example_inputs)"
        )
    if isinstance(inputs, Mapping) and inputs:  # keyword arguments, as fxshard.plan takes them
        return model, dict(inputs)
    if not isinstance(inputs, tuple | list | Mapping):
        inputs = (inputs,)
    if not inputs:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(model.forward).parameters.values()
        needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
        if needed:
            raise UsageError(
                f"{target} returned a module whose forward takes {', '.join(needed)}: "
                "return (module, example_inputs), tensors on the meta device will do"
            )
    return model, tuple(inputs)


def shortened(error: BaseException) -> str:
    """The traceback of an error without the frames of Python, installed packages and fxshard.

    Where nothing else is left, all of it.
    """
    paths = sysconfig.get_paths()
    foreign = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    foreign.append(str(Path(__file__).resolve().parent.parent))
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith("<frozen")
        and not any(Path(frame.filename).resolve().is_relative_to(path) for path in foreign)
    ]
    what = "".join(traceback.format_exception_only(error))
    if not own:
        return what if isinstance(error, SyntaxError) else "".join(traceback.format_exception(error))
    left_out = len(frames) - len(own)
    note = f"; {left_out} frames of Python, torch and fxshard left out" if left_out else ""
    return f"Traceback (most recent call last{note}):\n" + "".join(traceback.format_list(own)) + what
