"""The plan of a bucket, on which ranks must agree: its layout, dtypes, how it travels, and the bytes that follow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fxshard.kernels.float8 import COLUMNWISE, ROWWISE, scale_shape
from fxshard.kernels.mxfp8 import BLOCK
from fxshard.planner.domain import UNKNOWN, BytesPerRank, Domain, Placement
from fxshard.planner.gather_modes import Copies, Float8Recipe, Gather
from fxshard.planner.layout import Layout, aligned
from fxshard.planner.parts import Cuts
from fxshard.planner.state import bytes_of_moments, staging_bytes

SCALES = 4
"""The scales of a weight begin at a multiple of so many, 16 bytes: Inductor compiles for inputs that do, and copies
others before every call."""


@dataclass(frozen=True)
class BucketPlan:
    """Everything about a bucket that can be known without a process group: what ranks must agree on."""

    index: int
    name: str
    unit: str
    layout: Layout
    placement: Placement
    param_dtype: torch.dtype
    master_dtype: torch.dtype
    reduce_dtype: torch.dtype
    trainable: bool
    gather: Gather = Gather.PLAIN
    """What travels when the bucket is gathered; anything but ``PLAIN`` holds weights of quantized linears."""
    domain: Domain = UNKNOWN
    matrices: tuple[str, ...] = ()
    """The parameters that Muon updates; the others are AdamW's."""
    why: str = ""
    """Why it has the layout it has."""
    shares_state: bool = False
    """Whether replicas of a shard keep state of a part of it each (HSDP); not where Muon's matrices travel."""
    float8: Float8Recipe | None = None
    """How products with these parameters run in float8; what is quantized otherwise is so in MXFP8."""
    state: str = "fp32"
    """The format of the optimizer's moments: "fp32" (as the masters are), "bf16" or "8bit"."""
    offload: str = "none"
    """Where they are between steps: "none", on the device, or on the "host"."""
    row_moments: bool = False
    """Whether Muon keeps a second moment of every row of the matrices (NorMuon)."""
    cuts: Cuts | None = None
    """The matrices that are cut over a tensor-parallel group; ``layout`` is that of this rank's parts."""

    @property
    def params(self) -> tuple[str, ...]:
        return self.layout.names

    @property
    def resident(self) -> bool:
        """Whether the unsharded parameters stay in memory all the time instead of in the arena.

        With one rank the masters are whole: parameters that compute in their dtype are the masters themselves, and
        quantized copies stay. What is cast goes through the arena under ZeRO-3, as where it is gathered.
        """
        cast = self.param_dtype != self.master_dtype and not self.rests_quantized
        return not self.placement.param or (self.layout.ranks == 1 and not cast)

    @property
    def grad_in_arena(self) -> bool:
        """Whether full gradients only exist during backward; otherwise they are written to where they stay."""
        return self.trainable and self.placement.grad and self.layout.ranks > 1

    @property
    def adds_replicas(self) -> bool:
        """Whether a reduced shard is added up over its replicas by a collective of its own (HSDP).

        What is not sharded needs none: its one all-reduce is over all ranks.
        """
        return self.trainable and self.layout.ranks > 1 and self.domain.replicas > 1

    @property
    def reducing_ranks(self) -> int:
        """Ranks that a reduction of full gradients runs over: the shards, or all ranks where there is one shard."""
        return self.layout.ranks if self.layout.ranks > 1 else self.domain.ranks

    def group(self, default: str, *, replicas: bool = False) -> str:
        """The name in a schedule of the process group of this bucket's collectives, or of those over its replicas."""
        if not self.domain.device:
            return default
        return (
            self.domain.group(self.domain.replicas, "replicas") if replicas else self.domain.group(self.reducing_ranks)
        )

    @property
    def quantized(self) -> bool:
        """Whether products with these parameters run in MXFP8 or float8."""
        return self.gather is not Gather.PLAIN

    @property
    def rests_quantized(self) -> bool:
        """Whether unsharded parameters exist as quantized copies only."""
        return self.gather in (Gather.STAGED, Gather.DIRECT)

    @property
    def staged(self) -> bool:
        """Whether a gather goes through a staging buffer, which shares memory with gradients."""
        return self.gather is Gather.STAGED and self.layout.ranks > 1

    @property
    def staged_in_arena(self) -> bool:
        """Whether that memory is the arena's (ZeRO-2) and not a full gradient that stays (ZeRO-1)."""
        return self.staged and self.grad_in_arena

    @property
    def gathered_bytes(self) -> int:
        """Bytes that one gather makes; of a bucket that is gathered quantized, of one copy."""
        if self.gather is Gather.DIRECT:
            return self.copy_bytes(self.layout.numel)
        return self.layout.numel * self.param_dtype.itemsize

    def copy_bytes(self, numel: int) -> int:
        """Bytes of one quantized copy: payload and compact scales, which in float8 all ranks have without a gather."""
        return numel + numel // BLOCK if self.float8 is None else numel

    @property
    def all_copies(self) -> Copies:
        """The quantized copies that there are."""
        return Copies.BOTH if self.float8 is None or self.float8.copies == 2 else Copies.ROWWISE

    @property
    def scale_shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the scales of every copy of every parameter, in float8: those of the rowwise copy first."""
        if self.float8 is None or not self.rests_quantized:
            return ()
        axes = (ROWWISE, COLUMNWISE)[: self.float8.copies]
        shapes = [slot.spec.shape for slot in self.layout.slots]
        return tuple(scale_shape(shape, self.float8.scaling, axis) for shape in shapes for axis in axes)

    @property
    def scale_spans(self) -> tuple[tuple[int, int], ...]:
        """Where each lies among the scales of the bucket: its first, and the one after its last."""
        spans, start = [], 0
        for rows, columns in self.scale_shapes:
            spans.append((start, start + rows * columns))
            start += aligned(rows * columns, SCALES)
        return tuple(spans)

    @property
    def scale_count(self) -> int:
        """How many scales a bucket has room for."""
        return aligned(self.scale_spans[-1][1], SCALES) if self.scale_shapes else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of those scales, which every rank holds."""
        return self.scale_count * torch.float32.itemsize

    @property
    def grad_bytes(self) -> int:
        return self.layout.numel * self.reduce_dtype.itemsize if self.trainable else 0

    @cached_property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's moments on the rank that has most of them, wherever they are kept."""
        return bytes_of_moments(self) if self.trainable else 0

    @cached_property
    def staging_bytes(self) -> int:
        """Bytes that an update holds on the device of moments that rest on the host."""
        return staging_bytes(self)

    def at_rest(self, state_tensors: int = 2) -> BytesPerRank:
        """Bytes one rank holds for this bucket between two steps, gradients not yet dropped: the table of its stage.

        ``state`` counts the optimizer's tensors (AdamW has two, Muon one: the second covers AdamW's parameters only),
        unless they are on the host, and, where parameters compute in another dtype, the masters. A master that has the
        compute dtype is the parameter itself, so it costs nothing where that is replicated.
        """
        layout, size = self.layout, self.master_dtype.itemsize
        masters = layout.shard_numel * size
        mixed = self.param_dtype != self.master_dtype
        if self.rests_quantized:
            held = layout.numel if self.resident else layout.shard_numel
            param, state = self.all_copies.number * self.copy_bytes(held) + self.scale_bytes, masters
        elif self.resident:
            param, state = layout.numel * self.param_dtype.itemsize, masters if mixed else 0
        else:
            param, state = (0, masters) if mixed else (masters, 0)
        if not self.trainable:
            return BytesPerRank(param, 0, state)
        keeps_full_grad = not self.placement.grad and layout.ranks > 1
        if self.offload == "none":
            state += self.moment_bytes if state_tensors == 2 else masters * state_tensors
        return BytesPerRank(param, masters + (self.grad_bytes if keeps_full_grad else 0), state)
