"""Launches recorded once and then repeated with one call: a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """A tensor as an address: it owns nothing."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def bytes(self) -> int:
        """From its first to its last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def over(self, raw: torch.Tensor) -> torch.Tensor:
        """The tensor, given its bytes."""
        return raw.view(self.dtype).as_strided(self.shape, self.stride)


class CudaTape:
    """Captures CUDA graphs that share one memory pool: at any time only one of them has anything in it.

    All are captured on one stream, since the allocator gives memory that was freed back to the same stream only. And
    none is ever destroyed before the tape: a pool without graphs cannot be used again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def busy(self) -> bool:
        """Whether a capture is under way already."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """What starts again everything that ``run`` starts, and what ``run`` returned; nothing has run yet."""
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        generator = torch.cuda.default_generators[self._stream.device_index]
        before = generator.clone_state()
        # It empties the allocator's cache first: what the same program needed when it ran becomes the graph's memory.
        # Other threads (NCCL's watchdog, data loaders) may go on calling CUDA meanwhile.
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = run()
        except BaseException:
            # Where a capture cannot be ended torch leaves its own stream, and random numbers that cannot be drawn.
            torch.cuda.set_stream(current)
            generator.graphsafe_set_state(before)
            raise
        self._graphs.append(graph)
        return graph.replay, result

    def delete(self) -> None:
        """Let go of all graphs. Nothing is captured after that."""
        torch.cuda.synchronize(self.device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def tensor_at(self, place: Place) -> torch.Tensor:
        """The tensor at an address, which the tape's memory keeps for it."""
        return place.over(torch.as_tensor(_Bytes(place), device=self.device))

    def pool_bytes(self) -> tuple[int, int]:
        """Bytes of its memory, and how many of them the allocator counts as allocated."""
        if self._pool is None:
            return 0, 0
        segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(self._pool)]
        return sum(s["total_size"] for s in segments), sum(s["allocated_size"] for s in segments)


class _Bytes:
    """Device memory as ``torch.as_tensor`` takes it over without copying."""

    def __init__(self, place: Place) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (place.address, False),
            "shape": (place.bytes,),
            "strides": None,
            "typestr": "|u1",
        }
