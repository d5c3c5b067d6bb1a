"""The first matrix product and the first attention on a GPU, before a model asks for them: libraries load then, for a
sixth of a second, and a thread that waits for that leaves the interpreter to others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

HEADS = (1, 1, 128, 64)


def load_libraries(device: torch.device, dtype: torch.dtype) -> None:
    """Multiply something small. What cuBLAS allocates for it stays, for the next who multiplies."""
    with torch.no_grad(), torch.cuda.device(device):
        x = torch.ones(HEADS, device=device, dtype=dtype)
        torch.mm(x[0, 0], x[0, 0].mT)
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
