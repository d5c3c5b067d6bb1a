"""The kernel that a process which compiles GPU kernels begins with. Nobody runs it.

Triton takes half a second to set itself up when a process compiles its first kernel, and Inductor has many processes:
a model's first step would wait for most of them. They compile this one while the model is traced, and import what
kernels that Inductor writes import.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fxshard import _compat

SIGNATURE = {"source": "*fp32", "target": "*fp32", "size": "i32", "BLOCK": "constexpr", "NUMBER": "constexpr"}


@triton.jit
def _copy(source, target, size, BLOCK: tl.constexpr, NUMBER: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < size) + NUMBER, at < size)


def compile_first(number: int, capability: int) -> None:
    """Compile a kernel for a GPU of that compute capability (90: 9.0); one number, one kernel: none is in a cache."""
    _compat.import_what_kernels_import()
    compile_copy(number, capability)


def compile_copy(number: int, capability: int = 90) -> None:
    """The same without asking for a GPU, which a process that will be forked must not do."""
    source = ASTSource(_copy, signature=SIGNATURE, constexprs={(3,): 128, (4,): number})
    triton.compile(source, target=GPUTarget("cuda", capability, 32))
