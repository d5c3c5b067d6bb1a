"""``fxshard doctor``: what this machine has, and which implementations will be chosen on it.

Every line is looked up where the choice is made, so that it cannot say something else than what will happen.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from fxshard._torch.progress import progress
from fxshard._version import __version__

if TYPE_CHECKING:
    import torch


class State(StrEnum):
    GOOD = "ok"
    MISSING = "–"
    """Not here, and not needed either: something is slower or left out."""
    BAD = "!!"
    """Something will fail."""


@dataclass(frozen=True)
class Finding:
    """One line: what was looked for, how it stands, and the details or the reason."""

    part: str
    name: str
    state: State
    detail: str


Found = tuple[State, str]
Check = Callable[[], Found]


def examine() -> list[Finding]:
    """Everything that is looked at, in the order it is printed."""
    checks: list[tuple[str, str, Check]] = [
        ("needed", "fxshard", lambda: (State.GOOD, __version__)),
        ("needed", "Python", lambda: _at_least(sys.version.split()[0], "3.11")),
        ("needed", "torch", lambda: _version("torch", "2.11")),
        ("needed", "rich", lambda: _version("rich", "13")),
        ("devices", "CUDA", _cuda),
        ("devices", "NCCL", _nccl),
        ("devices", "gloo", _gloo),
        ("compilers", "C++ compiler", _compiler),
        ("compilers", "Triton", _triton),
        ("extras", "Transformer Engine", _transformer_engine),
        ("extras", "transformers", lambda: _extra("transformers", "for Hugging Face models: pip install -e '.[hf]'")),
        ("extras", "safetensors", lambda: _extra("safetensors", "for Hugging Face files: pip install -e '.[hf]'")),
        ("chosen", "lowering", _lowering),
        ("chosen", "experts", _experts),
        ("chosen", "Newton–Schulz", _newton_schulz),
        ("chosen", "MXFP8 products", _mxfp8_products),
        ("chosen", "MXFP8 quantizer", _mxfp8_quantizer),
        ("chosen", "hardware preset", _hardware),
    ]
    found = []
    with progress(len(checks)) as begin:
        for part, name, check in checks:
            begin(name)
            found.append(Finding(part, name, *_safely(check)))
    return found


def _safely(check: Check) -> Found:
    """A check that fails is a finding, not a crash: the person came because something does not work."""
    try:
        return check()
    except Exception as error:
        return State.BAD, f"{type(error).__name__}: {error}".splitlines()[0]


# -- what is here ------------------------------------------------------------------------------------------------------


def _at_least(found: str, least: str) -> Found:
    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())

    fine = numbers(found) >= numbers(least)
    return (State.GOOD, found) if fine else (State.BAD, f"{found}, but {least} or newer is needed")


def _version(package: str, least: str) -> Found:
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        return State.BAD, f"cannot be imported: {error}"
    # torch's own says which CUDA it was built for; what it was installed as may not.
    return _at_least(getattr(module, "__version__", None) or importlib.metadata.version(package), least)


def _extra(package: str, purpose: str) -> Found:
    if importlib.util.find_spec(package) is None:
        return State.MISSING, f"not installed; {purpose}"
    return State.GOOD, importlib.metadata.version(package)


def _cuda() -> Found:
    import torch

    if not torch.backends.cuda.is_built():
        return State.MISSING, "this torch is built without CUDA; ranks run on the CPU"
    if not torch.cuda.is_available():
        return State.MISSING, f"built for CUDA {torch.version.cuda}, but no device is usable: see nvidia-smi"
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(f"{about.name} ({about.major}.{about.minor}, {about.total_memory / 2**30:.0f} GiB)")
    kinds = [f"{found.count(kind)} × {kind}" for kind in dict.fromkeys(found)]
    return State.GOOD, f"{', '.join(kinds)}; CUDA {torch.version.cuda}"


def _nccl() -> Found:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        state = State.BAD if torch.cuda.device_count() > 1 else State.MISSING
        return state, "not in this torch; several CUDA ranks need it"
    return State.GOOD, ".".join(map(str, torch.cuda.nccl.version()))


def _gloo() -> Found:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        return State.BAD, "not in this torch; ranks compare their plans through it"
    return State.GOOD, "in torch"


def _compiler() -> Found:
    """Inductor writes C++ for a CPU, and for a GPU the host's part of a segment."""
    from fxshard._torch.private import cpp_compiler

    found = cpp_compiler()
    if found is None:
        return State.BAD, 'not found, and Inductor needs one on a CPU: install g++, set CXX, or use lowering="eager"'
    return State.GOOD, shutil.which(found) or found


def _triton() -> Found:
    import torch

    if importlib.util.find_spec("triton") is not None:
        return State.GOOD, importlib.metadata.version("triton")
    if torch.cuda.is_available():
        return State.BAD, "not installed; Inductor needs it for CUDA devices"
    return State.MISSING, "not installed; only CUDA devices need it"


def _transformer_engine() -> Found:
    from fxshard.kernels.by_te import engine_refusal

    if importlib.util.find_spec("transformer_engine") is None:
        return State.MISSING, "not installed; only experts='te' and 'te-mxfp8' need it: pip install -e '.[te]'"
    reason = engine_refusal()
    if reason is not None:
        return State.MISSING, reason
    return State.GOOD, importlib.metadata.version("transformer-engine")


# -- what will be chosen -----------------------------------------------------------------------------------------------


def _lowering() -> Found:
    import torch

    return State.GOOD, "inductor, " + ("Triton kernels" if torch.cuda.is_available() else "C++ kernels")


def _experts() -> Found:
    """For a common case: bf16, sizes that every kernel takes."""
    import torch

    from fxshard.kernels.case import Case
    from fxshard.kernels.choose import choose, refusal

    case = Case(_device(), torch.bfloat16, hidden=2048, inner=1408, experts=64)
    reasons = [f"not {name}: {reason}" for name in ("triton", "te") if (reason := refusal(name, case)) is not None]
    choice = choose("auto", case)
    return State.GOOD, "; ".join([choice.name, *reasons, choice.why])


def _newton_schulz() -> Found:
    from fxshard.optim.newton_schulz import explain

    return State.GOOD, "; ".join(f"{n} × {m}: {explain((n, m), _device())}" for n, m in ((2048, 2048), (2048, 5632)))


def _mxfp8_products() -> Found:
    from fxshard.kernels.mxfp8_products import path

    return State.GOOD, path(_device())


def _mxfp8_quantizer() -> Found:
    from fxshard.kernels.quantize import CAPABILITY, runs_on

    if runs_on(_device()):
        return State.GOOD, "Triton kernel, both copies at once"
    least = ".".join(map(str, CAPABILITY))
    return State.GOOD, f"torch; the kernel needs Triton and compute capability {least}"


def _hardware() -> Found:
    from fxshard.frontend.sharding import machine
    from fxshard.passes.options import Options

    name = machine(Options(), _device()).name
    return State.GOOD, f"{name} (what schedules are made for, unless hardware= says otherwise)"


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# -- the command -------------------------------------------------------------------------------------------------------


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has, and which implementations will be chosen",
        description="Say what this machine has (ok, – not here and not needed, !! something will fail) and which "
        "implementations will be chosen on it. The exit code is 1 where something will fail.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    findings = examine()
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
    else:
        show(findings)
    return int(any(finding.state is State.BAD for finding in findings))


def show(findings: list[Finding]) -> None:
    part = ""
    for finding in findings:
        if finding.part != part:
            part = finding.part
            print(("\n" if finding is not findings[0] else "") + part)
        print(f"  {finding.state:<3}{finding.name:<20}{finding.detail}")
    bad = [finding.name for finding in findings if finding.state is State.BAD]
    print(f"\nNeeds attention: {', '.join(bad)}." if bad else "\nEverything that is needed is here.")
