"""Figures of devices and networks, from which every estimate is made.

A preset is a starting point for planning before the machine is there. Each figure says where it comes from; a recorded
profile replaces estimates where it matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
"""Seconds of a stretch of compute beyond its work: a kernel's start and drain, with a host that runs ahead. Assumed."""

GEMM = 0.79
"""Share of the dense peak that large GEMMs reach: measured on the H200, 767–790 TFLOP/s in bf16 of 990.
Taken over for devices on which we have not measured."""

COPY = 0.9
"""Share of the memory bandwidth that kernels reach: measured on the H200, a copy at 4.3 TB/s of 4.8, read and write
counted. Taken over for devices on which we have not measured."""


PCIE = 0.87
"""Share of the link's rate that copies of pinned memory reach: some 55 of the 63 GB/s of PCIe 5. Not measured by us."""


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
    host_bandwidth: float = 0.0
    """Bytes/s in one direction between a device and pinned memory of its host; 0: the device's memory is the host's."""

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

    def host_seconds(self, size: int) -> float:
        """To copy bytes to the host, or back. Within one memory, they are read and written."""
        return size / (self.host_bandwidth or self.traffic_per_second / 2) + self.launch_overhead

    def compute_seconds(self, flops: float, traffic: float, dtype: torch.dtype, in_float8: float = 0.0) -> float:
        """Roofline: the longer of arithmetic and memory traffic, and a launch. ``in_float8``: so many of ``flops``.

        >>> f"{hardware('h200').compute_seconds(flops=782.1e12, traffic=0, dtype=torch.bfloat16):.3f}"
        '1.000'
        """
        own = self.flops_in(dtype)
        quantized = max(own, self.flops_in(torch.float8_e4m3fn))  # emulated where there is no such product
        arithmetic = (flops - in_float8) / own + in_float8 / quantized
        return max(arithmetic, traffic / self.traffic_per_second) + self.launch_overhead


def _nvidia(
    name: str,
    *,
    bfloat16: float,
    float32: float,
    float8: float,
    bandwidth: float,
    gigabytes: int,
    nvlink: float,
    network: float,
    host: float,
    capability: tuple[int, int],
    ranks_per_node: int = 8,
) -> Hardware:
    """A preset from NVIDIA's data sheets: TFLOP/s without sparsity, GB/s (of links in one direction), GB of memory."""
    rates = {"bfloat16": bfloat16, "float16": bfloat16, "float32": float32, "float8": float8}
    return Hardware(
        name,
        flops={dtype: rate * 1e12 for dtype, rate in rates.items()},
        memory_bandwidth=bandwidth * 1e9,
        memory_bytes=gigabytes * 10**9,
        ranks_per_node=ranks_per_node,
        intra_bandwidth=NCCL_INTRA * nvlink * 1e9,
        intra_latency=INTRA_LATENCY,
        inter_bandwidth=NCCL_INTER * network * 1e9,
        inter_latency=INTER_LATENCY,
        capability=capability,
        host_bandwidth=PCIE * host * 1e9,
    )


_A100 = _nvidia(
    "a100",  # SXM4, 80 GB, in DGX and HGX A100
    bfloat16=312,
    float32=19.5,  # without TF32, as torch computes by default
    float8=312,  # no FP8 units: multiplied after conversion
    bandwidth=2039,
    gigabytes=80,
    nvlink=300,  # NVLink 3: 600 GB/s both directions
    host=31.5,  # PCIe 4, 16 lanes
    network=25,  # one HDR InfiniBand card of 200 Gbit/s per GPU (DGX A100)
    capability=(8, 0),
)
_H100 = _nvidia(
    "h100",  # SXM5, 80 GB, in DGX and HGX H100; the data sheet gives rates with sparsity: halved
    bfloat16=990,
    float32=67,
    float8=1979,
    bandwidth=3350,
    gigabytes=80,
    nvlink=450,  # NVLink 4: 900 GB/s both directions
    host=63,  # PCIe 5, 16 lanes
    network=50,  # one NDR InfiniBand card of 400 Gbit/s per GPU (DGX H100)
    capability=(9, 0),
)
# The arithmetic and the network of the H100, with 141 GB. GEMM and COPY were measured on it.
_H200 = replace(_H100, name="h200", memory_bandwidth=4.8e12, memory_bytes=141 * 10**9)
_B200 = _nvidia(
    "b200",  # HGX B200, whose data sheet is for eight GPUs and has rates with sparsity: halved, by eight
    bfloat16=2250,  # 36 PFLOP/s
    float32=75,  # 600 TFLOP/s
    float8=4500,  # 72 PFLOP/s
    bandwidth=7700,  # 62 TB/s
    gigabytes=180,  # 1.4 TB
    nvlink=900,  # NVLink 5: 1.8 TB/s both directions
    host=63,  # PCIe 5, 16 lanes
    network=50,  # one card of 400 Gbit/s per GPU (DGX B200)
    capability=(10, 0),
)
_GB200 = _nvidia(
    "gb200",  # GB200 NVL72, whose data sheet is for 72 GPUs and has rates with sparsity: halved, by 72
    bfloat16=2500,  # 360 PFLOP/s
    float32=80,  # 5,760 TFLOP/s
    float8=5000,  # 720 PFLOP/s
    bandwidth=8000,  # 576 TB/s
    gigabytes=186,  # 13.4 TB
    nvlink=900,  # NVLink 5: 130 TB/s, both directions
    host=225,  # NVLink-C2C: 900 GB/s both directions, for two GPUs
    network=50,  # one ConnectX-7 of 400 Gbit/s per GPU
    capability=(10, 0),
    ranks_per_node=72,  # one NVLink domain
)
_CPU = Hardware(
    "cpu",  # an orientation for gloo ranks on one machine: every figure is an assumption
    flops={"bfloat16": 50e9, "float16": 50e9, "float32": 100e9, "float8": 50e9},  # an AVX2 core at 3 GHz: 96 GFLOP/s
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
)

PRESETS = {preset.name: preset for preset in (_A100, _H100, _H200, _B200, _GB200, _CPU)}


def hardware(choice: str | Hardware) -> Hardware:
    """A preset by name, in any case; a :class:`Hardware` is given back as it is."""
    if isinstance(choice, Hardware):
        return choice
    found = PRESETS.get(choice.lower()) if isinstance(choice, str) else None
    if found is None:
        raise ConfigError(
            f"hardware: {choice!r} is not known; known are {', '.join(PRESETS)}. "
            "For anything else give a fxshard.planner.hardware.Hardware"
        )
    return found
