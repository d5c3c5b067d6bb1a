"""What several benchmarks have in common of a command line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DEVICES = ("cpu", "cuda")


def parser_of(about: str | None, name: str | None = None) -> argparse.ArgumentParser:
    """The options that all have. ``about``: the docstring of a benchmark, of which the first line counts."""
    parser = argparse.ArgumentParser(prog=name, description=(about or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    import torch

    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=DEVICES, default=best, help=f"(default here: {best})")


def listed(known: Iterable[str], others: Callable[[str], bool] = lambda name: False) -> Callable[[str], list[str]]:
    """A type for ``add_argument``: names with commas in between, each of them known, or one of ``others``."""
    names = list(known)

    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in names and not others(name):
                raise argparse.ArgumentTypeError(f"no {name!r}; there are {', '.join(names)}")
        return text.split(",")

    return parse


def in_fresh_process(*command: str, **options: Any) -> dict[str, Any]:
    """What a Python that runs ``command`` prints last, as JSON."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True, **options)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
