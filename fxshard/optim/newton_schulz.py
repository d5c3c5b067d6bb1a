"""Newton–Schulz: the orthogonal factor of many matrices at once, nearly.

Each matrix is normalised in fp32 (``start`` says when) and multiplied in bf16. Three forms compute the same polynomial:

plain       gram = X·Xᵀ, B = b·gram + c·gram², X ← a·X + B·X, as it is usually written: two and a half full products.
symmetric   Z = a·I + b·gram + c·gram², X ← Z·X, where gram and Z are symmetric, and half of each is computed.
gram        iterates on the small gram matrix alone, and multiplies X by the product of all Z at the end of a stretch.

What comes out for one matrix depends on its values, shape, dtype, device and form, never on which others are given with
it: no product is chosen by the number of matrices, and norms are taken one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from fxshard._torch.errors import ConfigError
from fxshard.optim import halves, symmetric
from fxshard.optim.coefficients import Triple, triples
from fxshard.optim.start import normalized, unscaled
from fxshard.planner.matrices import GRAM_RATIO

How = tuple[str, bool]  # the form, and whether GPU kernels compute it
Start = tuple[torch.Tensor, torch.Tensor | None]  # a batch, and what each of its matrices is still to be scaled by
# The kernels take no smaller sides, and padding smaller ones would cost more than half of them saves.
_SMALLEST = 256


@torch.no_grad()
def orthogonalize(
    matrices: Sequence[torch.Tensor],
    *,
    steps: int = 5,
    coefficients: str = "quintic",
    form: str = "auto",
    max_batch_bytes: int = 2**30,
) -> list[torch.Tensor]:
    """For each [rows, columns] or [batch, rows, columns], a bf16 tensor of its shape with singular values near one.

    Matrices of equal size run as one batch of at most ``max_batch_bytes`` of bf16 (or of one tensor, if that has more).
    Results may share memory with each other, never with the inputs.
    """
    iteration = triples(coefficients, steps)
    results: dict[int, torch.Tensor] = {}
    for members in _batches(matrices, max_batch_bytes):
        first = matrices[members[0]]
        how = choose(first.shape, first.device, form)
        begin = start(how, [matrices[i] for i in members])
        done = iterate(how, begin, iteration, tall=first.shape[-2] > first.shape[-1])
        done = done[:, : first.shape[-2], : first.shape[-1]]
        position = 0
        for i in members:
            shape = matrices[i].shape
            count = shape[0] if len(shape) == 3 else 1
            results[i] = done[position : position + count].reshape(shape)
            position += count
    return [results[i] for i in range(len(matrices))]


def choose(shape: Sequence[int], device: torch.device, form: str = "auto") -> How:
    """(form, whether the GPU kernels compute it) for matrices of this shape. Looks at nothing else."""
    small, large = sorted(shape[-2:])
    kernels = symmetric.available(device) and small >= _SMALLEST
    if form == "auto":
        form = "plain" if not kernels else "gram" if large > GRAM_RATIO * small else "symmetric"
    return form, kernels and form != "plain"


def explain(shape: Sequence[int], device: torch.device) -> str:
    """The form and the kernels for a matrix of this shape, in words."""
    chosen, kernels = choose(shape, device)
    return f"{chosen}, by {'Triton kernels' if kernels else 'torch.mm, one matrix at a time'}"


def start(how: How, tensors: Sequence[torch.Tensor]) -> Start:
    """The batch that ``iterate`` begins with, of matrices of one shape."""
    form, kernels = how
    if form == "plain":
        return normalized(tensors), None
    return unscaled(tensors, symmetric.TILE if kernels else 1, kernels)


def iterate(how: How, begin: Start, iteration: Sequence[Triple], *, tall: bool) -> torch.Tensor:
    """Newton–Schulz of a batch, in the form that it was started for."""
    (form, kernels), (batch, scale) = how, begin
    if form == "plain":
        return _plain(batch, iteration, tall)
    return _FORMS[form](batch, scale, iteration, tall, symmetric if kernels else halves)


def stretches(iteration: Sequence[Triple]) -> list[list[Triple]]:
    """Where the gram form starts afresh from X.

    Rounding leaves an error in the gram matrix, which every further step multiplies by up to a². In the first stretch
    the gram matrix of a normalised X has small eigenvalues, so that more is tolerable than later.
    """
    parts: list[list[Triple]] = [[]]
    growth, tolerable = 1.0, 150.0
    for triple in iteration:
        if parts[-1]:
            growth *= parts[-1][-1][0] ** 2
            if growth > tolerable:
                parts.append([])
                growth, tolerable = 1.0, 16.0
        parts[-1].append(triple)
    return parts


def _batches(matrices: Sequence[torch.Tensor], limit: int) -> list[list[int]]:
    """Positions of tensors that can run together: same device and size of matrix, and not too many."""
    open_batches: dict[tuple[torch.device, torch.Size], list[int]] = {}
    sizes: dict[tuple[torch.device, torch.Size], int] = {}
    closed = []
    for i, matrix in enumerate(matrices):
        if matrix.ndim not in (2, 3):
            raise ConfigError(f"orthogonalize: shape {list(matrix.shape)} is neither a matrix nor a batch of matrices")
        key = (matrix.device, matrix.shape[-2:])
        size = matrix.numel() * torch.bfloat16.itemsize
        if key in open_batches and sizes[key] + size > limit:
            closed.append(open_batches.pop(key))
        if key not in open_batches:
            open_batches[key], sizes[key] = [], 0
        open_batches[key].append(i)
        sizes[key] += size
    return closed + list(open_batches.values())


def _plain(batch: torch.Tensor, iteration: Sequence[Triple], tall: bool) -> torch.Tensor:
    done = []
    for matrix in batch:
        x = matrix.mT if tall else matrix
        for a, b, c in iteration:
            gram = halves.multiply(x, x.mT)
            update = halves.multiply(gram, gram, add=gram, alpha=c, beta=b)
            x = halves.multiply(update, x, add=x, beta=a)
        done.append(x.mT if tall else x)
    return torch.stack(done) if done else batch


def _symmetric(
    batch: torch.Tensor, scale: torch.Tensor | None, iteration: Sequence[Triple], tall: bool, kernels: ModuleType
) -> torch.Tensor:
    x, left = batch, scale
    for a, b, c in iteration:
        gram = kernels.symmetric_product(x, x, tall=tall, scale=left)
        x = kernels.product(kernels.polynomial(gram, a, b, c), x, tall=tall, scale=left)
        left = None  # the first step has scaled x
    return x


def _gram(
    batch: torch.Tensor, scale: torch.Tensor | None, iteration: Sequence[Triple], tall: bool, kernels: ModuleType
) -> torch.Tensor:
    x, left = batch, scale
    for part in stretches(iteration):
        gram = kernels.symmetric_product(x, x, tall=tall, scale=left)
        factor = None
        for i, (a, b, c) in enumerate(part):
            z = kernels.polynomial(gram, a, b, c)
            # All these commute, being polynomials of one matrix: their products are symmetric too.
            factor = z if factor is None else kernels.symmetric_product(z, factor)
            if i + 1 < len(part):
                gram = kernels.symmetric_product(z, kernels.symmetric_product(z, gram))
        x = kernels.product(factor, x, tall=tall, scale=left)
        left = None  # the first stretch has scaled x
    return x


_FORMS = {"symmetric": _symmetric, "gram": _gram}
