"""Processes that may be killed, forked from the tests' own: they have torch and the compiler loaded already."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def load_compiler() -> None:
    """Compile something, once, before forking: or each process would load the compiler by itself."""
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()


def fork(
    says: Path, environment: dict[str, str], fn: Callable[..., object], *args: Any
) -> multiprocessing.process.BaseProcess:
    """Start ``fn(*args)`` in a process of its own. What it prints, logs and raises goes to the file ``says``."""
    process = multiprocessing.get_context("fork").Process(target=_live, args=(says, environment, fn, args), daemon=True)
    process.start()
    return process


def _live(says: Path, environment: dict[str, str], fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    with says.open("w", buffering=1) as file:
        sys.stdout = sys.stderr = file
        logging.basicConfig(stream=file, force=True)
        os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **environment})
        torch.set_num_threads(1)  # those of the parent are not there
        try:
            fn(*args)
        except BaseException:
            traceback.print_exc()
            file.flush()
            os._exit(1)
    os._exit(0)
