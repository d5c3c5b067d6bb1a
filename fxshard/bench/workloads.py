"""The models that benchmarks train, by name, and batches for them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fxshard.bench import hugging_face, target
from fxshard.bench.harness import listed
from fxshard.bench.models import Llama, LlamaConfig

Inputs = tuple[Any, ...] | Mapping[str, Any]


class Size(NamedTuple):
    config: LlamaConfig
    batch: int
    length: int


SIZES = {
    "toy": Size(LlamaConfig(vocab=1000, dim=256, layers=8, heads=4, hidden=704), 4, 128),
    "1b": Size(LlamaConfig(), 4, 4096),
    "moe-toy": Size(LlamaConfig(vocab=1000, dim=128, layers=4, heads=4, hidden=96, experts=16), 4, 128),
    "moe-1b": Size(LlamaConfig(dim=1536, layers=12, heads=12, hidden=896, experts=16), 4, 4096),
}
SIZES |= {
    f"hf:{kind}{suffix}": SIZES[f"moe-{size}" if kind.endswith("-moe") else size]
    for kind in hugging_face.CONFIGS
    for suffix, size in (("", "1b"), ("-toy", "toy"))
}
MODELS = (*SIZES, "MODULE:FACTORY")


def add_models(parser: argparse.ArgumentParser, default: str) -> None:
    """The options that say which models a benchmark is about."""
    models = listed(MODELS, lambda name: ":" in name and not name.startswith("hf:"))
    about = f"of {', '.join(MODELS)}, one after the other (default: {default})"
    parser.add_argument("--model", type=models, metavar="NAME,...", help=about)
    parser.add_argument("--no-cache", action="store_true", help="models of transformers with use_cache=False")


def add_workloads(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The options that say which models are trained, and for how many steps."""
    add_models(parser, default="1b on CUDA, toy on a CPU")
    parser.add_argument("--batch", type=int, help="sequences per rank, where no factory makes them")
    parser.add_argument("--layers", type=int, help="another number of layers than the model has")
    parser.add_argument("--steps", type=int, default=5, help="steps per round (default: 5)")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds, in turns (default: {rounds})")


def workloads(arguments: argparse.Namespace) -> list[Workload]:
    """Those that the options of ``add_workloads`` ask for."""
    names = arguments.model or ["1b" if arguments.device == "cuda" else "toy"]
    return [Workload(name, arguments.layers, arguments.batch, not arguments.no_cache) for name in names]


@dataclass(frozen=True)
class Workload:
    """A model of ``MODELS``, with another number of layers or sequences if asked to."""

    name: str
    layers: int | None = None
    batch: int | None = None
    cache: bool = True
    """Whether a model of ``transformers`` fills its key/value cache, as it does unless told otherwise."""
    size: Size | None = None
    """The size of our Llama, where it is none of ``SIZES``."""
    sharing: int = 1
    """Neighbouring ranks that train on one batch, because they are tensor-parallel."""

    def build(self, device: torch.device) -> tuple[nn.Module, Inputs]:
        """The same model on every rank. Batches differ, but for that of a factory, which is what it returns."""
        torch.manual_seed(0)
        size = self.size or SIZES.get(self.name)
        with device:
            model, inputs = self._of(size) if size is not None else target.load(self.name, self.layers)
        config: Any = getattr(model, "config", None)
        if config is not None and not self.cache:
            config.use_cache = False
        return model, inputs

    def _of(self, size: Size) -> tuple[nn.Module, Inputs]:
        config = replace(size.config, layers=self.layers or size.config.layers)
        named = self.name.startswith("hf:")
        kind = self.name.removeprefix("hf:").removesuffix("-toy")
        model = hugging_face.build(kind, config, size.length) if named else Llama(config)
        torch.manual_seed(1 + (dist.get_rank() // self.sharing if dist.is_initialized() else 0))
        shape = (self.batch or size.batch, size.length)
        tokens, targets = (torch.randint(0, config.vocab, shape) for _ in range(2))
        return model, {"input_ids": tokens, "labels": tokens} if named else (tokens, targets)


def with_padding(inputs: Mapping[str, torch.Tensor], shortest: float) -> dict[str, torch.Tensor]:
    """A batch of text whose rows are padded to the longest: the shortest has that share of its tokens."""
    rows, length = inputs["input_ids"].shape
    ends = length * torch.linspace(shortest, 1, rows)
    mask = (torch.arange(length)[None, :] < ends[:, None]).to(torch.int64)
    return {**inputs, "attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}


def of_length(inputs: Inputs, length: int) -> Inputs:
    """The first tokens of each sequence of a batch."""
    given = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    longest = max(each.shape[-1] for each in given if isinstance(each, torch.Tensor) and each.dim() == 2)

    def cut(each: Any) -> Any:
        whole = isinstance(each, torch.Tensor) and each.shape[-1:] == (longest,)
        return each[..., :length].contiguous() if whole else each

    cut_ones = [cut(each) for each in given]
    return dict(zip(inputs, cut_ones, strict=True)) if isinstance(inputs, Mapping) else tuple(cut_ones)


def loss_of(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The loss: the value that the model returns, or its ``.loss``."""
    returned = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    loss: torch.Tensor = returned if isinstance(returned, torch.Tensor) else returned.loss
    return loss
