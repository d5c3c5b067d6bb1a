"""A CPU without products in bf16: one sentence, once, and no page of C++ frames."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import torch, fxshard
torch.manual_seed(0)
for _ in range(2):
    plain = torch.nn.Linear(64, 64)
    model = fxshard.compile(plain, precision=fxshard.Precision(param=torch.bfloat16), lowering="eager")
    model(torch.ones(64, 64)).sum().backward()
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN to limit")
def test_a_cpu_without_products_in_bf16_is_told_of_in_a_sentence() -> None:
    # oneDNN is told that the CPU has no more than AVX2.
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=limited, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning: this CPU has no products in bfloat16") == 1
    assert "frame #" not in done.stderr
    assert len(done.stderr.splitlines()) == 2  # the sentence, and the line that says where
