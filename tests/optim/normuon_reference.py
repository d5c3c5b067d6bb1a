"""NorMuon after the paper (arXiv 2510.05491, algorithm 1) and its authors' rule for the norm, in fp64 and by singular
values: nothing of the package's arithmetic is used."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tests.optim.reference import orthogonalized


@dataclass
class Reference:
    """One matrix, and its state."""

    weight: torch.Tensor
    lr: float
    weight_decay: float = 0.0
    beta1: float = 0.95
    beta2: float = 0.95
    scale: float = 1.0
    momentum: torch.Tensor = field(init=False)
    second: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.weight = self.weight.detach().double()
        self.momentum = torch.zeros_like(self.weight)
        self.second = torch.zeros(self.weight.shape[0], dtype=torch.float64)

    def step(self, grad: torch.Tensor) -> None:
        g = grad.double()
        self.momentum = self.beta1 * self.momentum + (1 - self.beta1) * g
        nesterov = (1 - self.beta1) * g + self.beta1 * self.momentum
        update = orthogonalized(nesterov)
        self.second = self.beta2 * self.second + (1 - self.beta2) * (update**2).mean(1)
        normalized = update / (self.second.sqrt() + 1e-10)[:, None]
        normalized = normalized * update.norm() / normalized.norm()
        self.weight = (1 - self.lr * self.weight_decay) * self.weight - self.lr * self.scale * normalized
