"""What a device and its network can do: the figures that every estimate is made from.

A preset is a starting point for planning before the machine is there. Each figure says where it comes from; a recorded
profile replaces estimates where it matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fxshard._torch.errors import ConfigError

NCCL_INTRA = 0.8
"""Share of the NVLink rate that large NCCL collectives reach. NCCL's own model caps the A100 at 235 of 300 GB/s
(src/graph/tuning.cc); for the H100, 370 of 450 GB/s are reported (NVIDIA/nccl issue 1374)."""

NCCL_INTER = 0.9
"""Share of the network cards' rate that large collectives reach between nodes: 340 of 400 GB/s are reported for an
all-reduce over 32 nodes with H100, less for an all-gather of 2 GB (NVIDIA/nccl issue 1218). Not measured by us."""

INTRA_LATENCY = 3.4e-6
"""A step inside a node: NVLink, ring, protocol Simple in NCCL's tuning table (src/graph/tuning.cc)."""

INTER_LATENCY = 9.6e-6
"""A step between nodes: network, ring, protocol Simple in the same table."""

LAUNCH = 3e-6
"""What a stretch of compute costs beyond its work: a kernel's start and drain, with a host that runs ahead. Assumed."""

GEMM = 0.79
"""Share of the dense peak that large GEMMs reach: measured on the H200, 767–790 TFLOP/s in bf16 of 990.
Taken over for devices on which we have not measured."""

COPY = 0.9
"""Share of the memory bandwidth that kernels reach: measured on the H200, a copy at 4.3 TB/s of 4.8, read and write
counted. Taken over for devices on which we have not measured."""


@dataclass(frozen=True)
class Hardware:
    """One kind of device and the network between several of them. SI units: FLOP/s, bytes/s, bytes, seconds."""

    name: str
    flops: dict[str, float] = field(hash=False)
    """Dense FLOP/s by the name of the dtype: ``bfloat16``, ``float16``, ``float32``, ``float8``."""
    memory_bandwidth: float
    memory_bytes: int
    ranks_per_node: int
    """Ranks that reach each other at ``intra_bandwidth``: an NVLink domain."""
    intra_bandwidth: float
    """Bytes/s per device in one direction inside a node, as collectives reach it (bus bandwidth)."""
    intra_latency: float
    inter_bandwidth: float
    """Bytes/s per device in one direction between nodes, as collectives reach it."""
    inter_latency: float
    efficiency: float = GEMM
    """Share of ``flops`` that GEMMs reach in practice."""
    memory_efficiency: float = COPY
    """Share of ``memory_bandwidth`` that kernels reach in practice."""
    launch_overhead: float = LAUNCH
    capability: tuple[int, int] | None = None
    """CUDA's compute capability, by which a plan knows the kernels that a run will have; None: those of any device."""

    def __post_init__(self) -> None:
        given = self.capability
        if given is not None and (not isinstance(given, tuple) or [type(number) for number in given] != [int, int]):
            raise ConfigError(f"hardware {self.name!r}: capability={given!r}, expected (9, 0) for 9.0, or None")

    def flops_in(self, dtype: torch.dtype) -> float:
        """FLOP/s that GEMMs of a dtype reach in practice. A dtype without a rate of its own computes in float32."""
        name = str(dtype).removeprefix("torch.")
        if name.startswith("float8"):
            name = "float8"
        return self.flops.get(name, self.flops["float32"]) * self.efficiency

    @property
    def traffic_per_second(self) -> float:
        """Bytes/s that kernels read and write in practice."""
        return self.memory_bandwidth * self.memory_efficiency

    def compute_seconds(self, flops: float, traffic: float, dtype: torch.dtype) -> float:
        """Roofline: the longer of arithmetic and memory traffic, and a launch.

        >>> f"{hardware('h200').compute_seconds(flops=782.1e12, traffic=0, dtype=torch.bfloat16):.3f}"
        '1.000'
        """
        return max(flops / self.flops_in(dtype), traffic / self.traffic_per_second) + self.launch_overhead


PRESETS: dict[str, Hardware] = {
    preset.name: preset
    for preset in (
        Hardware(
            name="a100",  # SXM4, 80 GB
            flops={
                # NVIDIA A100 data sheet: 312 TFLOP/s dense. fp32 without TF32, as torch computes by default.
                "bfloat16": 312e12,
                "float16": 312e12,
                "float32": 19.5e12,
                "float8": 312e12,  # no FP8 units: multiplied after conversion
            },
            memory_bandwidth=2.039e12,  # data sheet
            memory_bytes=80 * 10**9,  # data sheet
            ranks_per_node=8,  # DGX and HGX A100
            intra_bandwidth=NCCL_INTRA * 300e9,  # NVLink 3: 600 GB/s both directions (data sheet)
            intra_latency=INTRA_LATENCY,
            inter_bandwidth=NCCL_INTER * 25e9,  # one HDR InfiniBand card of 200 Gbit/s per GPU (DGX A100)
            inter_latency=INTER_LATENCY,
            capability=(8, 0),
        ),
        Hardware(
            name="h100",  # SXM5, 80 GB
            flops={
                # NVIDIA H100 data sheet, which gives the rates with sparsity: halved here.
                "bfloat16": 990e12,
                "float16": 990e12,
                "float32": 67e12,
                "float8": 1979e12,
            },
            memory_bandwidth=3.35e12,  # data sheet
            memory_bytes=80 * 10**9,  # data sheet
            ranks_per_node=8,  # DGX and HGX H100
            intra_bandwidth=NCCL_INTRA * 450e9,  # NVLink 4: 900 GB/s both directions (data sheet)
            intra_latency=INTRA_LATENCY,
            inter_bandwidth=NCCL_INTER * 50e9,  # one NDR InfiniBand card of 400 Gbit/s per GPU (DGX H100)
            inter_latency=INTER_LATENCY,
            capability=(9, 0),
        ),
        Hardware(
            name="h200",  # SXM5, 141 GB
            flops={
                # NVIDIA H200 data sheet: the arithmetic of the H100.
                "bfloat16": 990e12,
                "float16": 990e12,
                "float32": 67e12,
                "float8": 1979e12,
            },
            memory_bandwidth=4.8e12,  # data sheet
            memory_bytes=141 * 10**9,  # data sheet
            ranks_per_node=8,  # DGX and HGX H200
            intra_bandwidth=NCCL_INTRA * 450e9,  # NVLink 4: 900 GB/s both directions (data sheet)
            intra_latency=INTRA_LATENCY,
            inter_bandwidth=NCCL_INTER * 50e9,  # one NDR InfiniBand card of 400 Gbit/s per GPU (DGX H200)
            inter_latency=INTER_LATENCY,
            efficiency=0.79,  # measured: 767–790 of 990 TFLOP/s
            memory_efficiency=0.9,  # measured: copy at 4.3 of 4.8 TB/s
            capability=(9, 0),
        ),
        Hardware(
            name="b200",  # HGX B200
            flops={
                # NVIDIA HGX B200 data sheet, eight GPUs: 36 PFLOP/s FP16 and 72 FP8 with sparsity; halved, by eight.
                "bfloat16": 2250e12,
                "float16": 2250e12,
                "float32": 75e12,  # 600 TFLOP/s for eight
                "float8": 4500e12,
            },
            memory_bandwidth=7.7e12,  # HGX B200 data sheet: 62 TB/s for eight
            memory_bytes=180 * 10**9,  # HGX B200 data sheet: 1.4 TB for eight
            ranks_per_node=8,  # HGX B200
            intra_bandwidth=NCCL_INTRA * 900e9,  # NVLink 5: 1.8 TB/s both directions (data sheet)
            intra_latency=INTRA_LATENCY,
            inter_bandwidth=NCCL_INTER * 50e9,  # one card of 400 Gbit/s per GPU (DGX B200)
            inter_latency=INTER_LATENCY,
            capability=(10, 0),
        ),
        Hardware(
            name="gb200",  # GB200 NVL72
            flops={
                # NVIDIA GB200 NVL72 data sheet, 72 GPUs: 360 PFLOP/s FP16 and 720 FP8 with sparsity; halved, by 72.
                "bfloat16": 2500e12,
                "float16": 2500e12,
                "float32": 80e12,  # 5,760 TFLOP/s for 72
                "float8": 5000e12,
            },
            memory_bandwidth=8e12,  # data sheet: 576 TB/s for 72
            memory_bytes=186 * 10**9,  # data sheet: 13.4 TB for 72
            ranks_per_node=72,  # one NVLink domain
            intra_bandwidth=NCCL_INTRA * 900e9,  # NVLink 5: 130 TB/s for 72, both directions
            intra_latency=INTRA_LATENCY,
            inter_bandwidth=NCCL_INTER * 50e9,  # one ConnectX-7 of 400 Gbit/s per GPU
            inter_latency=INTER_LATENCY,
            capability=(10, 0),
        ),
        Hardware(
            name="cpu",  # an orientation for gloo ranks on one machine: every figure is an assumption
            flops={
                "bfloat16": 50e9,
                "float16": 50e9,
                "float32": 100e9,
                "float8": 50e9,
            },  # one AVX2 core at 3 GHz: 96 GFLOP/s
            memory_bandwidth=10e9,  # one core's share of a server's DRAM
            memory_bytes=16 * 2**30,
            ranks_per_node=64,  # all ranks on one machine
            intra_bandwidth=2e9,  # gloo over loopback
            intra_latency=50e-6,
            inter_bandwidth=1.25e9,  # 10 Gbit/s Ethernet
            inter_latency=100e-6,
            efficiency=0.7,
            memory_efficiency=0.8,
            launch_overhead=20e-6,
        ),
    )
}


def hardware(choice: str | Hardware) -> Hardware:
    """A preset by name, in any case; a :class:`Hardware` is given back as it is."""
    if isinstance(choice, Hardware):
        return choice
    found = PRESETS.get(choice.lower()) if isinstance(choice, str) else None
    if found is None:
        raise ConfigError(
            f"hardware: {choice!r} is not known; known are {', '.join(PRESETS)}. "
            "For anything else give a fxshard.plan.hardware.Hardware"
        )
    return found
