"""Random layers that repeat: each a few operations on values that go from layer to layer, drawn once for all layers.

One value is the residual stream; others are carried along without parameters, and the end reads all of them. Layers may
read what was made before the first, or by the first; weights may be shared by all, by two layers, by a layer and the
end, or frozen in one place of every layer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Values = list[torch.Tensor]


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2.0
    y[:, 1:3].mul_(0.5)
    return y


def _swapped(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([second, -first], -1)


ALONE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.tanh,
    torch.sin,
    torch.sigmoid,
    lambda x: torch.softmax(x, -1),
    lambda x: x + 0.1,
    lambda x: x * 0.9 + 0.05,
    lambda x: x.detach() * 0.5,
    lambda x: x / (1 + x.abs().mean()),
    lambda x: x.flip(0),
    lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    _in_place,
    _swapped,
)
WITHOUT_PARAMETERS = (ALONE[4], ALONE[5], ALONE[6], ALONE[1], ALONE[8])
"""Operations on the other values: without parameters, and mostly with nothing to save for backward."""
TWO: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    torch.add,
    lambda x, y: x * torch.tanh(y),
    lambda x, y: torch.where(x > y, x, 0.3 * y),
    lambda x, y: torch.softmax(x @ y.t(), -1) @ y,
)


@dataclass(frozen=True)
class Source:
    """A value that an operation reads: one that is carried (``c``), made in this layer (``t``), or made before all."""

    kind: str
    number: int


@dataclass(frozen=True)
class Operation:
    kind: str
    """``linear``, ``bias``, ``shared``, ``alone`` or ``two``."""
    which: int
    reads: tuple[Source, ...]


class Drawn(nn.Module):
    """Layers of one kind, or of two that take turns."""

    def __init__(self, choice: random.Random, width: int) -> None:
        super().__init__()
        self.carried = choice.choice([1, 2, 2, 3])
        self.kinds = [self._draw(choice, choice.randint(1, 4)) for _ in range(choice.choice([1, 1, 1, 2]))]
        layers = choice.randint(7, 9) * len(self.kinds) + choice.choice([0, 0, 1])
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in self.kinds[i % len(self.kinds)]) for i in range(layers)
        )
        self.shared = nn.Linear(width, width)
        self.read = choice.choice([None, None, None, 0, layers - 2, choice.randrange(layers)])
        self.checkpointed, self.written = choice.random() < 0.2, choice.random() < 0.2
        if choice.random() < 0.2:
            for layer in self.layers:
                cast(nn.ModuleList, layer)[0].requires_grad_(False)
        self.added = nn.ParameterList(0.1 * torch.randn(width) for _ in range(layers if choice.random() < 0.4 else 0))
        self.outside = choice.choice([0, layers - 1, choice.randrange(layers)]) if choice.random() < 0.3 else None
        if choice.random() < 0.4:
            self._tie(
                *choice.choice([(0, layers - 1), (0, 1), (layers - 2, layers - 1), choice.sample(range(layers), 2)])
            )

    def _tie(self, one: int, other: int) -> None:
        """Let two layers share what is added at their end, or, where nothing is, their first weight."""
        if self.added:
            self.added[one] = self.added[other]
        else:
            first, second = (cast(nn.ModuleList, self.layers[i])[0] for i in (one, other))
            first.weight = second.weight

    def _draw(self, choice: random.Random, length: int) -> list[Operation]:
        found: list[Operation] = []
        for i in range(length):
            sources = [Source("c", n) for n in range(self.carried)] * 2 + [Source("before", 0)]
            sources += [Source("t", n) for n in range(i)] * 3
            kinds = ["linear", "linear", "bias", "shared", "alone", "alone", "two"]
            kind = "linear" if not i else choice.choice(kinds)
            reads = (choice.choice(sources), choice.choice(sources))
            found.append(Operation(kind, choice.randrange(12), reads[: 2 if kind == "two" else 1]))
        return found

    def layer(self, number: int, before: torch.Tensor, *carried: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operations = self.kinds[number % len(self.kinds)]
        made: Values = []
        values = {"c": carried, "t": made, "before": [before]}
        for operation, linear in zip(operations, cast(Sequence[nn.Linear], self.layers[number]), strict=True):
            reads = [values[source.kind][source.number] for source in operation.reads]
            made.append(self._made(operation, linear, reads))
        stream = carried[0] + 0.4 * torch.tanh(made[-1])
        if self.added:
            stream = stream + self.added[number]
        first, kinds = operations[0].which, WITHOUT_PARAMETERS
        others = [kinds[(first + i) % len(kinds)](value) for i, value in enumerate(carried[1:])]
        return stream, *others

    def _made(self, operation: Operation, linear: nn.Linear, reads: Values) -> torch.Tensor:
        if operation.kind == "two":
            return TWO[operation.which % len(TWO)](reads[0], reads[1])
        if operation.kind == "alone":
            return ALONE[operation.which](reads[0])
        if operation.kind == "bias":
            return reads[0] + linear.bias
        return cast(torch.Tensor, (self.shared if operation.kind == "shared" else linear)(reads[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.tanh(x)
        carried: Values = [x, *(torch.sin(x * n) for n in range(2, self.carried + 1))]
        total, ends = torch.zeros_like(x), torch.zeros_like(x)
        for number in range(len(self.layers)):
            if self.checkpointed:
                carried = list(checkpoint(self.layer, number, before, *carried, use_reentrant=False))
            else:
                carried = list(self.layer(number, before, *carried))
            if self.written:
                total.add_(torch.tanh(carried[-1]))
            if number == self.read:
                ends = ends + carried[-1]
        if self.outside is not None:
            ends = ends * cast(Sequence[nn.Linear], self.layers[self.outside])[0].bias
        return carried[0] + torch.sin(ends + sum(carried[1:], total))
