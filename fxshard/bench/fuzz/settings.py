"""Random settings: what a model is compiled with, and which optimizer takes its steps."""

from __future__ import annotations

import random
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fxshard.frontend.api import compile as sharded
from fxshard.frontend.module import ShardedModule
from fxshard.optim.config import AdamW, Muon
from fxshard.passes.options import Debug

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}

TORCH: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}, {}),
    "AdamW": ({}, {"amsgrad": True}, {"betas": (0.8, 0.9)}, {"maximize": True}),
    "Adam": ({}, {"amsgrad": True}),
    "RMSprop": ({}, {"momentum": 0.9, "centered": True}),
    "NAdam": ({}, {"decoupled_weight_decay": True}),
    "RAdam": ({},),
    "Adagrad": ({}, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adamax": ({},),
    "Adadelta": ({},),
    "ASGD": ({"t0": 2.0},),
}
OWN = (
    AdamW(**SETTINGS),
    AdamW(**SETTINGS, betas=(0.8, 0.9), nan="skip"),
    AdamW(**SETTINGS, offload="host"),
    AdamW(**SETTINGS, over_replicas=True),
    AdamW(**SETTINGS, groups={"heads.a.*": {"lr": 3e-3}, "*.bias": {"weight_decay": 0.0}}),
    AdamW(**SETTINGS, decay=lambda name, shape: len(shape) > 1),
)
MUON = (
    Muon(adamw=AdamW(**SETTINGS)),
    Muon(adamw=AdamW(**SETTINGS), weight_decay=0.1, nesterov=False, scale="rms"),
    Muon(adamw=AdamW(**SETTINGS), over_replicas=True),
    Muon(adamw=AdamW(**SETTINGS), beta2=0.9, groups={"blocks.*": {"momentum": 0.8}}),
)


class Settings:
    """Made from a seed, the same on every rank. ``optimizer``: ``adamw``, ``sgd``, or fxshard's ``own``."""

    def __init__(self, seed: int, zero: int, optimizer: str, ranks: int) -> None:
        choice = random.Random(f"settings {seed}")
        self.zero, self.ranks = zero, ranks
        self.layout = choice.choice(["auto", "auto", "rows", "whole"])
        self.reduction = choice.choice(["mean", "mean", "mean", "sum"])
        self.replicas = choice.choice([n for n in range(1, ranks + 1) if not ranks % n])
        self.debug = Debug(
            prefetch=choice.choice([None, None, 0, 1, 3]),
            keep_resident=choice.random() < 0.8,
            defer_wgrad=choice.random() < 0.8,
            overlap=choice.random() < 0.9,
            arena=choice.random() < 0.8,
        )
        self.lowering = "inductor" if choice.random() < 0.02 else "eager"
        self.budget = choice.choice([1.0, 1.1, 1.3]) if choice.random() < 0.1 else None
        """Times the least that does."""
        self.activations = choice.choice(["auto", "recompute", "offload"])
        # Sums of more than two gradients depend on their order, and Muon turns such a difference into another update.
        own = (*OWN, *MUON) if ranks <= 2 else OWN
        self.own = choice.choice(own) if optimizer == "own" else None
        self.torch = "SGD" if optimizer == "sgd" else choice.choice(list(TORCH))
        self.torch_options = {"weight_decay": 0.1, **choice.choice(TORCH[self.torch])}
        self.torch_options["foreach"] = choice.choice([None, True, False])

    def __str__(self) -> str:
        torchs = ("torch", "torch_options")
        return ", ".join(
            f"{name}={value}" for name, value in vars(self).items() if self.own is None or name not in torchs
        )

    def compiled(self, model: nn.Module, units: Any, budget: int | None = None) -> ShardedModule:
        """The model, sharded and compiled so. ``budget``: bytes."""
        options: dict[str, Any] = {
            "zero": self.zero,
            "layout": self.layout,
            "reduction": self.reduction,
            "optimizer": self.own,
            "units": units,
            "debug": self.debug,
            "lowering": self.lowering,
        }
        if self.replicas > 1:
            shape = (self.replicas, self.ranks // self.replicas)
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        if budget is not None:
            options |= {"memory_budget": budget, "activations": self.activations, "hardware": "h200"}
        return sharded(model, **options)

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """One of torch's."""
        kind: Any = getattr(torch.optim, self.torch)
        return kind(list(parameters), lr=1e-2, **self.torch_options)  # type: ignore[no-any-return]

    def plain_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimizer that takes the same steps over a plain model: torch's AdamW, or Muon in one process."""
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if isinstance(self.own, Muon):
            return self.own.build(trained)
        if self.own is None:
            return self.optimizer_of(parameter for _, parameter in trained)
        return torch.optim.AdamW(
            [{"params": [parameter], **_options(self.own, name, parameter)} for name, parameter in trained]
        )


def _options(choice: AdamW, name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """The options of torch's AdamW for one parameter."""
    decays = choice.decay is None or choice.decay(name, tuple(parameter.shape))
    found: dict[str, Any] = {"lr": choice.lr, "betas": choice.betas, "eps": choice.eps}
    found["weight_decay"] = choice.weight_decay if decays else 0.0
    matching = [options for pattern, options in (choice.groups or {}).items() if fnmatchcase(name, pattern)]
    return {**found, **matching[0]} if matching else found
