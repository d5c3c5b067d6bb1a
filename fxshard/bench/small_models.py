"""A model of ``transformers`` in small: random weights, the same every time, and nothing that draws numbers later.

Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxshard.bench import sample_batches as batches
from fxshard.bench.sample_batches import Batch, MakeBatch
from fxshard.bench.target import UsageError

Sizes = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A model of ``transformers`` in small."""

    name: str
    model: str
    """The class of the model; its configuration's is the class's own."""
    sizes: Sizes
    batch: MakeBatch = batches.text
    depth: tuple[str, ...] = ("num_hidden_layers",)
    """Which fields are numbers of layers; dots lead into configurations inside."""
    kind: str = ""
    """Under which heading it stands in the table."""

    def config(self, layers: int) -> Any:
        """Its configuration, of the class's own kind."""
        sizes = _nested(self.sizes)
        for path in self.depth:
            _put(sizes, path.split("."), layers)
        config = self._class().config_class(**sizes)
        for each in _with_inner(config):
            _draw_nothing(each)
        return config

    def build(self, layers: int) -> nn.Module:
        """The same weights every time."""
        config = self.config(layers)
        torch.manual_seed(0)
        model: nn.Module = self._class()(config)
        return model.train()

    def make_batch(self, seed: int) -> Batch:
        return self.batch(self.config(1), torch.Generator().manual_seed(seed))

    def _class(self) -> Any:
        return getattr(_transformers(), self.model)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError("bench models needs transformers: pip install -c constraints.txt -e '.[hf]'") from None
    return transformers


def _nested(sizes: Sizes) -> dict[str, Any]:
    return {name: _nested(value) if isinstance(value, Mapping) else value for name, value in sizes.items()}


def _put(sizes: dict[str, Any], path: list[str], layers: int) -> None:
    """Where stages have depths of their own, the third is the deep one."""
    for name in path[:-1]:
        sizes = sizes[name]
    before = sizes.get(path[-1])
    sizes[path[-1]] = [*before[:2], layers, *before[3:]] if isinstance(before, list | tuple) else layers


def _with_inner(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from _with_inner(value)


DRAWING = ("drop", "jitter", "mask_time_prob", "mask_feature_prob", "noise")
"""Parts of the names of fields that say how often something is drawn."""


def _draw_nothing(config: Any) -> None:
    for name, value in vars(config).items():
        if isinstance(value, float) and any(part in name for part in DRAWING):
            setattr(config, name, 0.0)
