"""Names that benchmarks take. No torch is imported here, so they are checked before any rank is started."""

from __future__ import annotations

TRAIN = (
    "fxshard",
    "fxshard-graphs",
    "fxshard-unfused",
    "fxshard-muon",
    "fxshard-muon-zero1",
    "fxshard-zero2",
    "fxshard-zero1",
    "fxshard-zero0",
    "fsdp2",
    "fsdp2-compile",
    "ddp",
    "compile",
)
TRAIN_SIZES = ("toy", "1b", "moe-toy", "moe-1b")
CHECKPOINT = ("fsdp2", "fxshard", "asynchronous")
CHECKPOINT_SIZES = ("small", "1b")
COMPILE_TIME_PEERS = ("fsdp2-compile",)
MOE = ("eager", "compile", "dense", "dense-fused", "torch", "triton", "te")
DEVICES = ("cpu", "cuda")
