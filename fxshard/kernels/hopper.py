# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""What the kernels for matrix products on a Hopper have in common (``optim.tiles``, ``fused.hopper_kernels`` and
``fused.hopper_gradient``).

A warp that copies fills stages of shared memory and says so at the barriers ``full``; warps that multiply take tiles of
128 × 256 out of them and say at ``empty`` when a stage may be filled again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def stage_barriers(STAGES: gl.constexpr):
    """``full`` and ``empty``, a barrier of each for every stage."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    return full, empty


@gluon.jit
def multiply_stage(total, turn, a_bufs, b_bufs, full, ADD: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr):
    """Queue the product of the next stage, once it is filled."""
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    stage = turn % STAGES
    mbarrier.wait(full.index(stage), turn // STAGES & 1)
    a_buf = a_bufs.index(stage)
    b_buf = b_bufs.index(stage)
    if A_T:
        a_buf = a_buf.permute((1, 0))
    if B_T:
        b_buf = b_buf.permute((1, 0))
    return warpgroup_mma(a_buf, b_buf, total, use_acc=ADD, is_async=True)


@gluon.jit
def release(total, turn, empty, STAGES: gl.constexpr):
    """All queued products but the last are done: the stage before it may be filled again."""
    total = warpgroup_mma_wait(1, (total,))
    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
    return total


@gluon.jit
def halves(x, WIDTH: gl.constexpr, layout: gl.constexpr):
    """The two halves of the columns, ``WIDTH`` each. Each thread has some of both already: nothing moves."""
    left, right = x.reshape([128, 2, WIDTH]).permute(0, 2, 1).split()
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def quarters(total, half: gl.constexpr, part: gl.constexpr):
    """The columns of a tile in four parts, rounded, to be stored one by one."""
    left, right = halves(total, 128, half)
    p0, p1 = halves(left, 64, part)
    p2, p3 = halves(right, 64, part)
    return rounded(p0), rounded(p1), rounded(p2), rounded(p3)


@gluon.jit
def rounded(x):
    """fp32 to bf16, here and now.

    Left to itself the compiler converts where the value is stored, and keeps the sums in fp32 until then, in the
    registers that the products of the next tile already write: it would have to wait for each of them.
    """
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=False, pack=2
    )
