"""The first matrix product and the first attention on a GPU, before a model asks for them: libraries and kernels load
then, for a good part of a second, and a thread that waits for that leaves the interpreter to others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

LENGTH = 128
WIDTHS = (64, 128)
"""Of heads: attention has kernels of their own for each, forward and backward, which CUDA loads when they first run."""


def load_libraries(device: torch.device, dtype: torch.dtype) -> None:
    """Multiply something small. What cuBLAS allocates for it stays, for the next who multiplies."""
    with torch.cuda.device(device):
        x = torch.ones(LENGTH, LENGTH, device=device, dtype=dtype)
        torch.mm(x, x)
        for width in WIDTHS:
            attend(x[None, None, :, :width])


def attend(x: torch.Tensor) -> None:
    """Attention and its gradients. Without these where they may have to be deterministic, which is not to be
    complained about here.
    """
    x = x.detach().requires_grad_(not torch.are_deterministic_algorithms_enabled())
    result = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    if result.requires_grad:
        result.sum().backward()
