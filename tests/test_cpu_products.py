"""A CPU without products in bf16: one sentence, once, and no page of C++ frames."""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import fxshard


def train(said: Path) -> None:
    """In a process in which nothing was multiplied yet: oneDNN is told that the CPU has no more than AVX2."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    with said.open("w") as file:
        os.dup2(file.fileno(), 2)
    for _ in range(2):
        plain = torch.nn.Linear(64, 64)
        model = fxshard.compile(plain, precision=fxshard.Precision(param=torch.bfloat16), lowering="eager")
        model(torch.ones(64, 64)).sum().backward()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN to limit")
def test_a_cpu_without_products_in_bf16_is_told_of_in_a_sentence(tmp_path: Path) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])  # as the ranks of the pool start
    process = context.Process(target=train, args=(tmp_path / "said",))
    process.start()
    process.join(timeout=200)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    assert said.count("RuntimeWarning: this CPU has no products in bfloat16") == 1
    assert "frame #" not in said
    assert len(said.splitlines()) == 2  # the sentence, and the line that says where
