"""What Transformer Engine's fused grouped MLP for MXFP8 asks of experts and of the machine, gate by gate.

Where one of these is not met Transformer Engine says nothing and runs its operations one by one, so all of them are
looked at here first. They are asked in an order in which nothing spoils a later attempt: the environment variable
comes before the import that reads it.
"""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from typing import Any

import torch

from fxshard.kernels.by_te import engine, engine_refusal
from fxshard.kernels.case import Case
from fxshard.kernels.glu import CLAMPED_GEGLU, Glu

KERNEL = "GroupedMLP_CuTeGEMMGLU"
"""The operation that Transformer Engine puts in the place of the three (``transformer_engine.pytorch.ops.fused``)."""
VARIABLE = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
ALLOWS = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
OLDEST = (2, 20)
"""Graphs call the operation phase by phase, and so know what it keeps for backward (``te_mlp``)."""
CAPABILITY = 10
INTERLEAVE = 32
MULTIPLE = 64
FRONTEND = "nvidia-cudnn-frontend"
OLDEST_FRONTEND = (1, 23)
OLDEST_FOR_CONSTANTS = (1, 24)
"""Older ones have the clamped activation with gpt-oss's constants alone."""
WRAPPERS = tuple(f"grouped_gemm_{name}_wrapper_sm100" for name in ("glu", "dglu", "quant", "wgrad"))


def fused_mlp_refusal(case: Case) -> str | None:
    """The first gate that keeps the fused grouped MLP from running these experts on this machine, or None."""
    found = _form_refusal(case) or _variable_refusal() or engine_refusal() or _version_refusal()
    return found or _device_refusal(case) or _last_word()


def _form_refusal(case: Case) -> str | None:
    if case.device.type != "cuda":
        return f"they are on {case.device.type}, Transformer Engine's fused grouped MLP needs a CUDA device"
    if case.dtype != torch.bfloat16:
        return f"Transformer Engine's fused grouped MLP quantizes bfloat16, they are {case.dtype}"
    if not case.joined:
        return "Transformer Engine's fused grouped MLP takes gate and up as one weight, they are two"
    if case.glu.interleave != INTERLEAVE:
        found = f"alternate every {case.glu.interleave}" if case.glu.interleave else "are halves"
        wanted = f"takes gate and up alternating every {INTERLEAVE} columns"
        return f"Transformer Engine's fused grouped MLP {wanted}, they {found} (fxshard.kernels.glu.interleave_glu)"
    if not case.out_by_in:
        return "Transformer Engine reads each expert's weight as [out, in], they lie [in, out] in memory"
    if case.hidden % MULTIPLE or case.inner % MULTIPLE:
        return f"hidden size {case.hidden} and inner size {case.inner} must be multiples of {MULTIPLE}"
    return None


def _variable_refusal() -> str | None:
    value = os.environ.get(VARIABLE)
    if value is not None and value.strip().isdigit() and int(value) > 0:
        return None
    found = "is not set" if value is None else f"is {value!r}"
    return f"{VARIABLE} {found}: set it to 1 before Transformer Engine is imported, which looks at it once"


def _version_refusal() -> str | None:
    version = engine().version
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= OLDEST:
        return None
    return f"Transformer Engine {version} is older than {_text(OLDEST)}, whose fused grouped MLP is the one known here"


def _device_refusal(case: Case) -> str | None:
    major, minor = torch.cuda.get_device_capability(case.device)
    if major != CAPABILITY:
        return f"Transformer Engine's fused grouped MLP needs compute capability {CAPABILITY}, this is {major}.{minor}"
    if torch.are_deterministic_algorithms_enabled() or os.environ.get(ALLOWS) == "0":
        asked = f"torch.use_deterministic_algorithms, or {ALLOWS}=0"
        return f"its gradients of routing weights are added up in no fixed order, and that is ruled out ({asked})"
    return _frontend_refusal(case.glu)


def _frontend_refusal(glu: Glu) -> str | None:
    try:
        version = metadata.version(FRONTEND)
    except metadata.PackageNotFoundError:
        return f"{FRONTEND} is not installed: install {_text(OLDEST_FRONTEND)} or later"
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < OLDEST_FRONTEND:
        return f"{FRONTEND} {version} is older than {_text(OLDEST_FRONTEND)}"
    usual = (1.0, float("inf"), 0.0), (CLAMPED_GEGLU.alpha, CLAMPED_GEGLU.limit, CLAMPED_GEGLU.offset)
    if (glu.alpha, glu.limit, glu.offset) not in usual and found < OLDEST_FOR_CONSTANTS:
        return f"{FRONTEND} {version} has no {glu.name}: {_text(OLDEST_FOR_CONSTANTS)} or later takes any constants"
    try:
        cudnn = importlib.import_module("cudnn")
        for wrapper in WRAPPERS:
            getattr(cudnn, wrapper)
    except Exception as error:  # its kernels are imported when they are first named, and bring what they need along
        return f"{FRONTEND} {version} does not give its grouped GEMM kernels ({type(error).__name__}: {error})"
    return None


def _last_word() -> str | None:
    """What Transformer Engine says itself. It looks once, when it is imported, and keeps the answer."""
    version, kernel = engine().version, fused_operation()
    if kernel is None:
        return f"Transformer Engine {version} has no {KERNEL}"
    if kernel.is_supported():
        return None
    asked_again = getattr(kernel.is_supported, "__wrapped__", None)
    if asked_again is not None and asked_again(kernel):
        return f"{VARIABLE} was set after Transformer Engine had been imported: set it before"
    return f"Transformer Engine {version} says that {KERNEL} is not supported here, and not why"


def fused_operation() -> Any:
    """The class of the fused operation, or None where this version has none."""
    return getattr(engine().module("ops.fused"), KERNEL, None)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
