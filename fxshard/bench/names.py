"""Names that benchmarks take. No torch is imported here, so they are checked before any rank is started."""

from __future__ import annotations

import argparse

VARIANTS = ("no-logits", "graphs", "unfused", "muon", "muon-zero1", "zero2", "zero1", "zero0")
TRAIN = ("fxshard", *(f"fxshard-{variant}" for variant in VARIANTS), "fsdp2", "fsdp2-compile", "ddp", "compile")
HUGGING_FACE = ("llama", "qwen3", "gemma3", "qwen3-moe")
FACTORY = "MODULE:FACTORY"
MODELS = (
    *("toy", "1b", "moe-toy", "moe-1b"),
    *(f"hf:{kind}{size}" for kind in HUGGING_FACE for size in ("", "-toy")),
    FACTORY,
)
CHECKPOINT = ("fsdp2", "fxshard", "asynchronous")
CHECKPOINT_SIZES = ("small", "1b")
COMPILE_TIME_PEERS = ("fsdp2-compile",)
MOE = ("eager", "compile", "dense", "dense-fused", "torch", "triton", "te")
DEVICES = ("cpu", "cuda")


def add_models(parser: argparse.ArgumentParser, default: str) -> None:
    listed = f"of {', '.join(MODELS)}, one after the other (default: {default})"
    parser.add_argument("--model", type=_models, metavar="NAME,...", help=listed)
    parser.add_argument("--no-cache", action="store_true", help="models of transformers with use_cache=False")


def _models(listed: str) -> list[str]:
    for name in listed.split(","):
        if not is_known(name, MODELS):
            raise argparse.ArgumentTypeError(f"no {name!r}; there are {', '.join(MODELS)}")
    return listed.split(",")


def is_known(name: str, known: tuple[str, ...]) -> bool:
    """Whether it is one of them, or of the form of a factory where these are."""
    return name in known or (FACTORY in known and ":" in name and not name.startswith("hf:"))
