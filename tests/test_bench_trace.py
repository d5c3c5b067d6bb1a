"""What is read from a trace of training steps, on one small enough to add up by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fxshard.bench.trace import STEP, Moved, Wait, analyse, kind_of_move, overlap, read, table, union, waits

MAIN, BACKWARD, WATCHDOG = 1, 2, 3
COMPUTE, COMMUNICATION = 7, 20


def event(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 100, "tid": tid, "args": args}


def kernel(name: str, ts: float, dur: float, stream: int = COMPUTE) -> dict[str, Any]:
    return event("kernel", name, ts, dur, tid=stream, stream=stream, device=0)


TRACE = [
    {"ph": "M", "name": "process_name", "pid": 100, "args": {"name": "python"}},
    kernel("before_the_steps", 0, 90),
    event("user_annotation", "ProfilerStep#1", 90, 5000),
    event("user_annotation", STEP, 100, 400),
    event("user_annotation", STEP, 500, 400),
    # The device: 1000–3000 matrix products, 2500–3500 a gather that they hide by half, then nothing until 4000.
    kernel("nvjet_tst_128x256", 1000, 1200),
    kernel("nvjet_tst_128x256", 2000, 1000),
    kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2500, 1000, COMMUNICATION),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 4000, 100, stream=COMPUTE, correlation=11),
    event("gpu_memset", "Memset (Device)", 4100, 60, stream=COMPUTE, correlation=12),
    kernel("triton_poi_fused__to_copy_3", 4160, 40),
    # The host.
    event("cpu_op", "aten::mm", 110, 20),
    event("cuda_runtime", "cudaLaunchKernel", 112, 5, correlation=1),
    event("user_annotation", "Optimizer.step#AdamW.step", 200, 100),
    event("cpu_op", "aten::item", 210, 40),
    event("cpu_op", "aten::_local_scalar_dense", 215, 30),
    event("cuda_runtime", "cudaMemcpyAsync", 216, 4, correlation=11),
    event("cuda_runtime", "cudaStreamSynchronize", 221, 20, correlation=13),
    event("cuda_runtime", "cudaStreamSynchronize", 620, 10, tid=BACKWARD, correlation=14),
    event("cpu_op", "aten::nonzero", 610, 30, tid=BACKWARD),
    event("cuda_runtime", "cudaEventQuery", 650, 10, tid=WATCHDOG, correlation=15),
    event("cuda_runtime", "cudaEventSynchronize", 660, 10, tid=WATCHDOG, correlation=16),
    event("cuda_runtime", "cudaDeviceSynchronize", 950, 3300, correlation=17),  # behind the steps
]


def test_times_and_overlap() -> None:
    found = analyse(TRACE)
    assert found is not None and found.steps == 2
    assert found.window_ms == pytest.approx(3.2 / 2)
    assert found.busy_ms == pytest.approx((2.5 + 0.2) / 2)
    assert found.compute_ms == pytest.approx((2.0 + 0.04) / 2)
    assert found.communication_ms == pytest.approx(1.0 / 2)
    assert found.hidden == pytest.approx(0.5)
    assert found.idle_ms == pytest.approx(0.5 / 2)
    assert found.longest_gap_ms == pytest.approx(0.5)
    assert found.kernels == 2


def test_what_moves_without_computing() -> None:
    found = analyse(TRACE)
    assert found is not None
    assert found.moved == {"copy": Moved(0.5, 0.05), "cast": Moved(0.5, 0.02), "fill": Moved(0.5, 0.03)}


def test_waits_within_steps_and_where() -> None:
    found = analyse(TRACE)
    assert found is not None
    scalar = "Optimizer.step#AdamW.step > aten::_local_scalar_dense"
    assert found.waits == (
        Wait("cudaEventSynchronize", "no operator", 1, 0.01),
        Wait("cudaMemcpyAsync, pageable", scalar, 1, 0.004),
        Wait("cudaStreamSynchronize", scalar, 1, 0.02),
        Wait("cudaStreamSynchronize", "aten::nonzero", 1, 0.01),
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda, LoadWithCast<1>, StoreWithCast<1>>",
            "cast",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, bfloat16_copy_kernel_cuda(TensorIteratorBase&)>", "cast"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda(at::TensorIteratorBase&)>", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<2u>>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "fill"),
        ("void at::native::unrolled_elementwise_kernel<CUDAFunctor_add<float>, LoadWithCast<2>>", None),
        ("triton_poi_fused__to_copy_view_12", "cast"),
        ("triton_poi_fused_clone_transpose_0", "copy"),
        ("triton_poi_fused__to_copy_add_mul_silu_5", None),
        ("triton_red_fused_addmm_0", None),
        ("nvjet_tst_128x256", None),
        ("_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_STSM_NENS9_9Copy_AtomIJS27_NS_6", None),
    ],
)
def test_kernels_by_name(name: str, kind: str | None) -> None:
    assert kind_of_move(kernel(name, 0, 1)) == kind


def test_spans() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert overlap([(0, 4), (6, 9)], [(1, 2), (3, 7)]) == [(1, 2), (3, 4), (6, 7)]


def test_a_file_a_table_and_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": TRACE}).encode()))
    found = analyse(read(path))
    assert found is not None
    traced = {"fxshard": found, "on a CPU": None}
    made = table("toy", traced)
    assert "50.0%" in str(made)
    assert "fxshard waits: 1 × cudaStreamSynchronize (0.01 ms) in aten::nonzero" in waits(traced)
    bars = {chart.title.partition(": ")[2]: chart.bars for chart in made.charts()}
    assert bars["communication with no compute at the same time"] == (("fxshard", 0.25),)


def test_a_trace_without_a_device_or_without_steps() -> None:
    assert analyse([event("user_annotation", STEP, 0, 10), event("cpu_op", "aten::mm", 1, 2)]) is None
    with pytest.raises(ValueError, match="no annotation"):
        analyse([kernel("nvjet", 0, 1)])
