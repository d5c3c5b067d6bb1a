"""Linears that do not train, with weights that rest and travel in 8 or 4 bits: the base of a QLoRA fine-tune.

Codes and scales are frozen parameters like others: they are sharded, gathered in their own dtypes and never reduced,
and a schedule counts their bytes. The weight itself is made from them where it is used, inside the captured graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from fxshard._torch.errors import ConfigError
from fxshard.kernels.blockwise import BLOCK, FORMATS, dequantize, nf4_pairs, quantize


class FrozenLinear(nn.Module):
    """``nn.Linear`` whose weight is kept as codes and scales, of blocks of 64 along its rows."""

    pairs: torch.Tensor | None

    def __init__(self, linear: nn.Linear, format: str, pairs: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = linear.in_features, linear.out_features, format
        codes, scales = quantize(linear.weight, format)
        self.codes = nn.Parameter(codes, requires_grad=False)
        # As bits: model.to(bfloat16) and a precision policy would round them otherwise.
        self.scales = nn.Parameter(scales.view(torch.int32), requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("pairs", pairs, persistent=False)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight that codes and scales stand for."""
        return dequantize(self.codes, self.scales.view(torch.float32), self.pairs, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.dequantized(x.dtype), self.bias)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"this linear keeps its weight in {self.format}: read it with .dequantized() before fxshard.compile, "
                "it does not change after; merging an adapter into it, and DoRA, need the weight itself: do that with "
                "the model as it was before fxshard.quantize_frozen"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


def quantize_frozen(
    model: nn.Module,
    format: str = "nf4",
    *,
    linears: Sequence[str] = ("*",),
    exclude: Sequence[str] = ("*head", "*output", "*router"),
) -> nn.Module:
    """Keep the weights of frozen linears in 8 bits (``"int8"``) or 4 (``"nf4"``), with a scale for every 64 numbers.

    For a model with adapters, before ``fxshard.compile``: base weights then rest on the shards so, and are gathered so.
    The plain weights are gone. ``linears`` and ``exclude`` are patterns of module names. Linears that train, that share
    their weight, or whose rows are no multiples of 64 stay as they are; one that is named is refused with the reason.
    Changes the model in place, and returns it.

    >>> model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    >>> model = fxshard.compile(fxshard.quantize_frozen(model, "nf4"), optimizer=fxshard.AdamW(lr=2e-4))
    """
    if format not in FORMATS:
        raise ConfigError(f"quantize_frozen(format={format!r}): expected one of {', '.join(map(repr, FORMATS))}")
    found = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for pattern in linears:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ConfigError(f"quantize_frozen(linears=...): {pattern!r} matches no nn.Linear of the model")
    chosen, left_out = [], {}
    for name, linear in found.items():
        named = name in linears
        if not any(fnmatchcase(name, pattern) for pattern in linears):
            continue
        if not named and any(fnmatchcase(name, pattern) for pattern in exclude):
            continue
        problem = _problem(linear, uses[id(linear.weight)])
        if problem is None:
            chosen.append(name)
        elif named:
            raise ConfigError(f"quantize_frozen(linears=...) names {name!r}: {problem}")
        else:
            left_out[name] = problem
    if not chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:4]) or "none is chosen"
        raise ConfigError(
            f"quantize_frozen: no linear of {type(model).__name__} can be kept in {format} ({reasons}); freeze the "
            "base first (peft's get_peft_model does)"
        )
    tables: dict[torch.device, torch.Tensor] = {}
    for name in chosen:
        linear, device = found[name], found[name].weight.device
        if format == "nf4" and device not in tables:
            tables[device] = nf4_pairs(device)
        model.set_submodule(name, FrozenLinear(linear, format, tables.get(device)))
        del found[name], linear  # one plain weight goes after the other
    return model


def _problem(linear: nn.Linear, uses: int) -> str | None:
    """Why a linear stays as it is."""
    weight = linear.weight
    if weight.requires_grad:
        return "it trains"
    if isinstance(weight, DTensor):
        return "it is sharded already"
    if uses > 1:
        return "its weight is also that of another module"
    if weight.shape[1] % BLOCK:
        return f"its rows of {weight.shape[1]} are no multiple of {BLOCK}"
    return None
